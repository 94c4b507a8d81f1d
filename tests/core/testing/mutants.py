"""Kernels that are wrong in one place each, as ports have been or might be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from deepinfer.kernels import number_formats
from deepinfer.kernels.interface import Candidates, Mix, Rotation, Selection
from deepinfer.kernels.number_formats import group_amax
from deepinfer.kernels.records import Pool, gather_records, scatter_records
from deepinfer.kernels.reference import ReferenceKernels, entries, experts
from deepinfer.kernels.reference import engram as engram_module
from deepinfer.step import RingWrites

# ---- wrong results ----


def _larger_index_first(score_tn, allowed_tn, topk):
    order = torch.sort(score_tn.flip(1), dim=-1, descending=True, stable=True).indices
    order = score_tn.shape[1] - 1 - order[:, :topk]
    order = torch.where(allowed_tn.gather(1, order), order, -1)
    return torch.nn.functional.pad(order, (0, topk - order.shape[1]), value=-1)


def _forbidden_fill(score_tn, allowed_tn, topk):
    order = torch.sort(score_tn, dim=-1, descending=True, stable=True).indices[:, :topk]
    return torch.nn.functional.pad(order, (0, topk - order.shape[1]), value=-1)


class LargerEntryWinsTies(ReferenceKernels):
    def select_entries(self, *args):
        with mock.patch.object(entries, "best_first", _larger_index_first):
            return super().select_entries(*args)


class LargerExpertWinsTies(ReferenceKernels):
    def route(self, *args):
        with mock.patch.object(experts, "best_first", _larger_index_first):
            return super().route(*args)


class FillsUpWithForbiddenEntries(ReferenceKernels):
    def select_entries(self, *args):
        with mock.patch.object(entries, "best_first", _forbidden_fill):
            return super().select_entries(*args)


class SeesOneEntryTooFew(ReferenceKernels):
    def select_entries(self, q, weight, rows, *args):
        rows = replace(rows, positions_t=(rows.positions_t - 1).clamp(min=0))
        return super().select_entries(q, weight, rows, *args)


class DropsTheNewestBlock(ReferenceKernels):
    def select_entries(self, *args):
        selection, found = super().select_entries(*args)
        if found is not None:
            blocks = found.blocks_tb.clone()
            blocks[blocks == blocks.amax(1, keepdim=True)] = -1
            found = Candidates(blocks, found.block_size)
        return selection, found


class OneSinkhornStepLess(ReferenceKernels):
    def hc_pre(self, x, pre, weights, norm):
        weights = replace(weights, sinkhorn_iters=weights.sinkhorn_iters - 1)
        return super().hc_pre(x, pre, weights, norm)


class MixesOverTheOtherAxis(ReferenceKernels):
    def hc_post(self, y, x, mix):
        return super().hc_post(y, x, Mix(mix.pre_tc, mix.post_tc, mix.comb_tcc.mT.contiguous()))


class UsesTheFreshPreMix(ReferenceKernels):
    def hc_pre(self, x, pre, weights, norm):
        _, mix = super().hc_pre(x, pre, weights, norm)
        return super().hc_pre(x, mix.pre_tc, weights, norm)


@contextmanager
def _floor_scales() -> Iterator[None]:
    def floor(x_zd, group, largest, floor):
        bits = (group_amax(x_zd, group).clamp(min=floor) / largest).view(torch.int32)
        return (bits >> 23).to(torch.uint8)

    with mock.patch.object(number_formats, "group_scales_ue8m0", floor):
        yield


class FloorScaleInWindow(ReferenceKernels):
    def window_records(self, *args):
        with _floor_scales():
            return super().window_records(*args)


class FloorScaleInIndexKeys(ReferenceKernels):
    def store_index_keys(self, *args):
        with _floor_scales():
            super().store_index_keys(*args)


class FloorScaleInLinears(ReferenceKernels):
    def linear(self, *args, **kwargs):
        with _floor_scales():
            return super().linear(*args, **kwargs)


class EntriesInterleavedLikeRecords(ReferenceKernels):
    """Index keys written record after record instead of in sections."""

    def store_index_keys(self, latent, weight, norm, rotation, writes, pool):
        flat = replace(pool.format, entries_per_block=1)
        super().store_index_keys(latent, weight, norm, rotation, writes, Pool(pool.data, flat))


class RotatesHalves(ReferenceKernels):
    def rotate(self, x, rotation, *, inverse=False):
        pairs = rotation.cos_tr.shape[-1]
        order = torch.arange(2 * pairs).view(2, pairs).T.flatten()
        plain, rotary = x.split((x.shape[-1] - 2 * pairs, 2 * pairs), dim=-1)
        x = torch.cat((plain, rotary[..., order]), dim=-1)
        out = super().rotate(x, rotation, inverse=inverse)
        plain, rotary = out.split((x.shape[-1] - 2 * pairs, 2 * pairs), dim=-1)
        return torch.cat((plain, rotary[..., order.argsort()]), dim=-1)


class QuantizesAcrossGroups(ReferenceKernels):
    def grouped_linear(self, x, weight, num_groups):
        x = self._quantize_input(x, weight.quantizes_input)
        return super().grouped_linear(x, replace(weight, quantizes_input=False), num_groups)


class QuantizesTwice(ReferenceKernels):
    """Takes `is_quantized` for nothing, with a scale that is not the one the input has."""

    def linear(self, x, weight, *, wide=False, is_quantized=False):
        return super().linear(x * 1.1 if is_quantized else x, weight, wide=wide)


class LeavesOutARounding(ReferenceKernels):
    def hc_post(self, y, x, mix):
        return mix.post_tc[..., None] * y[:, None] + (mix.comb_tcc[..., None] * x[:, :, None]).sum(
            1
        )


class LeavesOutAnInnerRounding(ReferenceKernels):
    """The expert's gate and up products stay float32: the result is bfloat16 all the same."""

    def _expert(self, x, weights, e, limit, weight):
        gate_up, down = weights.data
        a, b = (x @ gate_up[e].T).split(weights.width, dim=-1)
        v = torch.nn.functional.silu(a.clamp(max=limit)) * b.clamp(-limit, limit)
        v = v if weight is None else v * weight
        return self._round(self._quantize_input(v, weights.quantizes_input) @ down[e].T)


class ClampsTheGateBelow(ReferenceKernels):
    def _expert(self, x, weights, e, limit, weight):
        gate_up, down = weights.data
        a, b = self._round(x @ gate_up[e].T).split(weights.width, dim=-1)
        v = torch.nn.functional.silu(a.clamp(-limit, limit)) * b.clamp(-limit, limit)
        v = v if weight is None else v * weight
        return self._round(self._quantize_input(v, weights.quantizes_input) @ down[e].T)


class MissingExpertIsTheLast(ReferenceKernels):
    def routed_experts(self, x, ids, weight, weights, limit):
        ids = torch.where(ids < 0, weights.num_experts - 1, ids)
        return super().routed_experts(x, ids, weight, weights, limit)


class CombinesInReverse(ReferenceKernels):
    def combine_experts(self, shared, routed):
        return super().combine_experts(shared, routed.flip(1))


class CombinesTheSharedExpertLast(ReferenceKernels):
    def combine_experts(self, shared, routed):
        total = torch.zeros_like(shared)
        for slot in range(routed.shape[1]):
            total = total + routed[:, slot]
        return self._round(total + shared)


class WeighsByBiasedScores(ReferenceKernels):
    def route(self, x, gate, bias, image_bias, is_image, topk, scaling):
        ids, _ = super().route(x, gate, bias, image_bias, is_image, topk, scaling)
        score = torch.nn.functional.softplus(self.linear(x, gate, wide=True)).sqrt() + bias
        chosen = score.gather(1, ids)
        return ids, scaling * chosen / chosen.sum(-1, keepdim=True)


class ForgetsTheImageBias(ReferenceKernels):
    def route(self, x, gate, bias, image_bias, is_image, topk, scaling):
        return super().route(x, gate, bias, None, is_image, topk, scaling)


class ReadsAPoisonedSlot(ReferenceKernels):
    """Multiplies a row that nobody wrote by zero."""

    def attention(self, q, record, rows, window, entries, selection, sink, rotation):
        out = super().attention(q, record, rows, window, entries, selection, sink, rotation)
        last = torch.tensor([window.num_rows - 1])
        return out + 0.0 * gather_records(window, last).sum().to(out.dtype)


class WindowIsOneTooShort(ReferenceKernels):
    def attention(self, q, record, rows, *args):
        window = rows.window_tw.clone()
        window[:, 0] = 0
        return super().attention(q, record, replace(rows, window_tw=window), *args)


class ScalesTheSink(ReferenceKernels):
    def attention(self, q, record, rows, window, entries, selection, sink, rotation):
        sink = sink * q.shape[-1] ** -0.5
        return super().attention(q, record, rows, window, entries, selection, sink, rotation)


class AttendsToHoles(ReferenceKernels):
    """The null row is a key of zeros instead of none."""

    def attention(self, q, record, rows, window, entries, selection, sink, rotation):
        if selection is None:
            return super().attention(q, record, rows, window, entries, selection, sink, rotation)
        holes = (selection.slots_tk == 0).sum(1)
        out = super().attention(q, record, rows, window, entries, selection, sink, rotation)
        return self._round(out / (1.0 + 0.01 * holes[:, None, None]))


class DoesNotRotateBack(ReferenceKernels):
    def attention(self, *args):
        out, rotation = super().attention(*args), args[-1]
        return self.rotate(out, rotation)


class PairsReadAfterWriting(ReferenceKernels):
    def pool_pairs(self, gate_value, writes, state):
        super().pool_pairs(gate_value, writes, state)
        return super().pool_pairs(gate_value, writes, state)


class GatesOfZeroStayHalfOpen(ReferenceKernels):
    def engram_gate(self, *args):
        with mock.patch.object(engram_module.torch, "copysign", lambda a, s: a * torch.sign(s)):
            return super().engram_gate(*args)


class ForgetsTheImageGate(ReferenceKernels):
    def engram_gate(self, x, kv, q, k, is_image, eps):
        return super().engram_gate(x, kv, q, k, torch.zeros_like(is_image), eps)


class HashesInTheOtherOrder(ReferenceKernels):
    def engram_rows(self, lookback, *args):
        return super().engram_rows(lookback.flip(1), *args)


class ForgetsTheTemperature(ReferenceKernels):
    def confidence(self, hidden, markov, weight, temperature):
        return super().confidence(hidden, markov, weight, 1.0)


class NormsInBfloat16(ReferenceKernels):
    def rms_norm(self, x, norm):
        rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
        scaled = (x * rms).bfloat16().to(x.dtype)
        return self._round(scaled * norm.weight_d)


class AddsAnEpsilonOfItsOwn(ReferenceKernels):
    def rms_norm(self, x, norm):
        return super().rms_norm(x, replace(norm, eps=1e-6))


# ---- side effects ----


class WritesToTheNullRow(ReferenceKernels):
    def store_window(self, record, rows, pool):
        super().store_window(record, rows, pool)
        scatter_records(pool, torch.zeros(1, dtype=torch.int64), record[:1])


class StoresOneRowTooMany(ReferenceKernels):
    """Also writes the row behind the newest one, which may be another sequence's."""

    def store_window(self, record, rows, pool):
        super().store_window(record, rows, pool)
        behind = rows.window_writes.slot_m[-1:] + 1
        writes = RingWrites(rows.window_writes.source_m[-1:], behind % pool.num_rows)
        super().store_window(record, replace(rows, window_writes=writes), pool)


class NormsInPlace(ReferenceKernels):
    def rms_norm(self, x, norm):
        return x.copy_(super().rms_norm(x, norm))


class ReturnsAView(ReferenceKernels):
    def expand_streams(self, h, num_streams):
        _, pre = super().expand_streams(h, num_streams)
        return h[:, None].expand(-1, num_streams, -1), pre


class StoresIntoItsLatent(ReferenceKernels):
    def store_entries(self, latent, rotation, writes, pool):
        super().store_entries(latent, rotation, writes, pool)
        latent.zero_()


class SelectsWithoutSlots(ReferenceKernels):
    def select_entries(self, *args):
        selection, found = super().select_entries(*args)
        return Selection(selection.entries_tk, selection.slots_tk.clamp(max=1)), found


# ---- rows that depend on others ----


class SplitDependsOnRows(ReferenceKernels):
    """A product whose columns are summed in more parts for many rows."""

    def linear(self, x, weight, *, wide=False, is_quantized=False):
        x = x if is_quantized else self._quantize_input(x, weight.quantizes_input)
        size = 64 if x.shape[0] < 8 else 24
        y = x.new_zeros((x.shape[0], weight.out_features))
        for part, w in zip(x.split(size, 1), weight.data.split(size, 1), strict=True):
            for column in range(part.shape[1]):
                y = y + part[:, column, None] * w[None, :, column]
            y = y * (1.0 + 2.0**-23)  # each part ends with a rounding of its own
        return y if wide else self._round(y)


class PaddingDependent(ReferenceKernels):
    """Pads rows to a multiple of four, and the padding enters a sum over the rows."""

    def rms_norm(self, x, norm):
        padding = -x.shape[0] % 4
        return super().rms_norm(x, norm) * (1.0 + padding * 2.0**-22)


class CompanionsEnterTheSoftmax(ReferenceKernels):
    """The peak of all rows instead of each row's own."""

    def attention(self, q, *args):
        out = super().attention(q, *args)
        peak = q.abs().amax() if q.numel() else 0.0
        return out * (1.0 + 1e-7 * peak)


class ExpertOrderByLoad(ReferenceKernels):
    """Adds the largest expert's rows in another precision."""

    def routed_experts(self, x, ids, weight, weights, limit):
        out = super().routed_experts(x, ids, weight, weights, limit)
        flat = ids.flatten()
        if (flat >= 0).any():
            busiest = flat[flat >= 0].mode().values
            out[ids == busiest] *= 1.0 + 2.0**-7
        return out


class ScoreDependsOnPlace(ReferenceKernels):
    """Entries of a vector's tail are scored a little higher: ties break otherwise."""

    def _index_scores(self, q, weight, key):
        score = super()._index_scores(q, weight, key)
        tail = torch.arange(score.shape[1]) >= score.shape[1] // 8 * 8
        return torch.where(tail, score + 1e-3 * score.abs() + 1e-5, score)


class RotationOfTheBatch(ReferenceKernels):
    """Angles relative to the step's first position: other roundings in every step."""

    def rotation(self, positions, frequencies):
        if not len(positions):
            return super().rotation(positions, frequencies)
        first = super().rotation(positions[:1], frequencies)
        rest = super().rotation(positions - positions[0], frequencies)
        cos = first.cos_tr * rest.cos_tr - first.sin_tr * rest.sin_tr
        return Rotation(cos, first.sin_tr * rest.cos_tr + first.cos_tr * rest.sin_tr)
