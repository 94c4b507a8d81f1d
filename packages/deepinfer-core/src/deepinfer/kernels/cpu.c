/* CPU kernels of DeepInfer: the operations of kernels/interface.py that cost time, in portable C.
 *
 * Every result of a row is computed by the same instructions in the same order whatever other rows run, however many
 * threads there are, and wherever the row lies in memory. That is why sums run over vector lanes with a fixed stride
 * and end in a fixed tree, and why threads share out rows or output columns, never parts of a sum.
 *
 * Vectors are GCC/Clang vector extensions: 16 floats with AVX-512, 8 with AVX2, 4 elsewhere (SSE, NEON). The Python
 * side (cpu.py, cpu_build.py) picks the flags for the machine, builds this file once and calls it through ctypes.
 *
 * Section numbers (2.3, 3.4, ...) are those of docs/model.md; K2.4 is docs/formats.md 2.4.
 * Shapes are row-major. T = rows, M = hidden size, D = head dim, C = streams; others at their functions.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VW 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define VW 8
#else
#define VW 4
#endif

typedef int64_t i64;
typedef float vf __attribute__((vector_size(4 * VW)));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef uint16_t vh __attribute__((vector_size(2 * VW)));

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
/* below this many multiply-adds, starting the other threads costs more than they save */
#define SERIAL_BELOW 24576

/* ------------------------------------------------------------------------------------------------ small things */

INLINE float bits_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t float_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE vf vload(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vstore(float *p, vf v) { memcpy(p, &v, sizeof v); }
/* the first n < VW values, zeros behind them */
INLINE vf vload_part(const float *p, i64 n) { vf v = {0}; memcpy(&v, p, 4 * n); return v; }

/* sum of the lanes: halves are added until one is left; no loop over an array, which would go through memory */
typedef float f8 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef float f2 __attribute__((vector_size(8)));
INLINE float lane_sum(vf v)
{
    struct { f4 low, high; } four;
#if VW == 16
    struct { f8 low, high; } eight;
    memcpy(&eight, &v, sizeof v);
    f8 half = eight.low + eight.high;
    memcpy(&four, &half, sizeof half);
    f4 a = four.low + four.high;
#elif VW == 8
    memcpy(&four, &v, sizeof v);
    f4 a = four.low + four.high;
#else
    (void)four;
    f4 a = v;
#endif
    return (a[0] + a[2]) + (a[1] + a[3]);
}

INLINE vf vmin(vf a, vf b) { vi m = a < b; return (vf)((m & (vi)a) | (~m & (vi)b)); }
INLINE vf vmax(vf a, vf b) { vi m = a > b; return (vf)((m & (vi)a) | (~m & (vi)b)); }

/* round to bfloat16, nearest even: the roundings of `served` (10.3) */
INLINE float round_bf16(float x)
{
    uint32_t u = float_bits(x);
    if ((u & 0x7fffffff) > 0x7f800000) return x; /* NaN */
    return bits_float((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u);
}

INLINE float rounded(float x, int served) { return served ? round_bf16(x) : x; }

/* e^x to about an ulp; 0 below -87.3 */
INLINE vf vexp(vf x)
{
    const vf one = {0}, low = one - 87.33f, high = one + 88.37f;
    vi below = x < low;
    x = vmin(vmax(x, low), high);
    vf scaled = x * 1.44269504f;
    vf magic = one + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vf n = (scaled + magic) - magic;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = one + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    vf y = p * (r * r) + r + 1.0f;
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    y = y * (vf)exponent;
    return (vf)(~below & (vi)y);
}

INLINE float exp1(float x) { vf v = {0}; v = v + x; return vexp(v)[0]; }
INLINE float sigmoid1(float x) { return 1.0f / (1.0f + exp1(-x)); }

/* memory of one thread, kept between calls: large malloc blocks would be fresh pages every time */
enum { SCRATCH_KEYS, SCRATCH_LOGITS, SCRATCH_ROW, SCRATCH_PANEL, SCRATCH_SLOTS };
static void *scratch(int which, size_t bytes)
{
    static __thread struct { void *at; size_t size; } kept[SCRATCH_SLOTS];
    if (kept[which].size < bytes) {
        free(kept[which].at);
        kept[which].size = bytes + bytes / 2;
        if (posix_memalign(&kept[which].at, 64, kept[which].size)) abort();
    }
    return kept[which].at;
}

/* ----------------------------------------------------------------------------------------------------- threads */

/* A loop shared by threads. The caller takes iterations like everybody else and waits only for iterations that somebody
 * has begun, never for a thread to turn up: on a machine with other work, where a barrier would wait for the scheduler
 * at every operation, the caller simply does more of them itself. Which thread runs an iteration changes nothing. */
typedef void (*Body)(const void *arguments, i64 i);

int di_threads = 1; /* set from Python before every operation */

enum { MAX_THREADS = 256, SPINS = 4000 };

/* The open loop as one number: serial number, iterations, next iteration. A thread that takes an iteration changes
 * the last part and thereby knows that the loop is still open. */
#define TICKET(job, n, next) ((uint64_t)(job) << 48 | (uint64_t)(n) << 24 | (uint64_t)(next))
#define TICKET_N(t) ((i64)((t) >> 24 & 0xffffff))
#define TICKET_NEXT(t) ((i64)((t) & 0xffffff))

static struct {
    _Atomic uint64_t ticket;
    _Atomic i64 done;
    _Atomic int busy, sleeping;
    int started;
    Body body;
    const void *arguments;
    pthread_mutex_t lock;
    pthread_cond_t wake;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

INLINE void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    sched_yield();
#endif
}

/* run iterations of the open loop until none is left */
static void work(void)
{
    uint64_t t = atomic_load(&pool.ticket);
    while (TICKET_NEXT(t) < TICKET_N(t)) {
        if (!atomic_compare_exchange_weak(&pool.ticket, &t, t + 1)) continue;
        pool.body(pool.arguments, TICKET_NEXT(t));
        atomic_fetch_add(&pool.done, 1);
        t = atomic_load(&pool.ticket);
    }
}

static void *worker(void *number)
{
    uint64_t seen = atomic_load(&pool.ticket);
    for (;;) {
        int spins = 0;
        while (atomic_load(&pool.ticket) >> 24 == seen >> 24 && spins++ < SPINS) pause_briefly();
        if (spins >= SPINS) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleeping, 1);
            while (atomic_load(&pool.ticket) >> 24 == seen >> 24) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load(&pool.ticket);
        if ((intptr_t)number < di_threads - 1) work();
    }
    return NULL;
}

/* a forked child has none of its parent's threads */
static void forget_threads(void)
{
    pool.started = 0;
    atomic_store(&pool.busy, 0);
    atomic_store(&pool.sleeping, 0);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
}

static void start_threads(void)
{
    static int prepared;
    if (!prepared) prepared = !pthread_atfork(NULL, NULL, forget_threads);
    while (pool.started < MIN(di_threads, MAX_THREADS) - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)pool.started)) break;
        pthread_detach(thread);
        pool.started++;
    }
}

/* body(arguments, i) for every i in [0, n). Serial where it is not `wide`, or where another caller has the threads. */
static void for_each(i64 n, int wide, Body body, const void *arguments)
{
    int nobody = 0;
    if (!wide || n < 2 || n > 0xffffff || di_threads < 2 || !atomic_compare_exchange_strong(&pool.busy, &nobody, 1)) {
        for (i64 i = 0; i < n; i++) body(arguments, i);
        return;
    }
    start_threads();
    pool.body = body;
    pool.arguments = arguments;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.ticket, TICKET((atomic_load(&pool.ticket) >> 48) + 1, n, 0));
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    work();
    for (int spins = 0; atomic_load(&pool.done) < n;)
        if (spins++ < SPINS) pause_briefly();
        else sched_yield();
    atomic_store(&pool.busy, 0);
}

/* several loops that do not depend on each other, as one: the threads meet once */
typedef struct { Body body; const void *arguments; i64 n; } Loop;

static void loop_task(const void *arguments, i64 i)
{
    const Loop *loop = arguments;
    for (; i >= loop->n; loop++) i -= loop->n;
    loop->body(loop->arguments, i);
}

static void for_each_of(const Loop *loops, int count, int wide)
{
    i64 n = 0;
    for (int i = 0; i < count; i++) n += loops[i].n;
    for_each(n, wide, loop_task, loops);
}

/* memory of one call; the caller frees it */
static void *memory(size_t bytes)
{
    void *at;
    if (posix_memalign(&at, 64, bytes + 64)) abort();
    return at;
}

/* --------------------------------------------------------------------------------------- number formats (10.2) */

enum { F32, BF16, FP8, FP4, FP4_KV, FP4_INDEX }; /* the same numbers stand in cpu.py */

static const float E2M1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

/* e4m3 and UE8M0 codes as floats; byte 0 of UE8M0 is 2^-127, a subnormal */
INLINE float e4m3_float(uint8_t b)
{
    return bits_float(((uint32_t)(b & 0x80) << 24) | ((uint32_t)(b & 0x7f) << 20)) * 0x1p120f;
}
INLINE float ue8m0_float(uint8_t b) { return b ? bits_float((uint32_t)b << 23) : 0x1p-127f; }

/* nearest e4m3 code of |x| <= 448, ties to even: steps of 2^-9 below 2^-6, then three mantissa bits */
INLINE uint8_t e4m3_code(float x)
{
    uint32_t u = float_bits(x), sign = (u >> 24) & 0x80, a = u & 0x7fffffff;
    if (a < 0x3c800000) /* |x| < 2^-6 */
        return sign | (uint8_t)(int)((bits_float(a) * 512.0f + 12582912.0f) - 12582912.0f);
    a += 0x7ffff + ((a >> 20) & 1);
    return sign | (uint8_t)((a >> 20) - (120 << 3));
}

/* nearest e2m1 code, ties to even, saturating; the sign of zero is kept (K2.2 bounds) */
INLINE uint8_t e2m1_code(float x)
{
    float a = fabsf(x);
    int c = (a > .25f) + (a >= .75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.f);
    return (uint8_t)c | (uint8_t)((float_bits(x) >> 28) & 8);
}

/* smallest power of two that brings amax within `largest`, as a UE8M0 byte */
INLINE uint8_t ue8m0_code(float amax, float largest)
{
    return (uint8_t)(((float_bits(amax / largest) + 0x7fffff) >> 23) & 0xff);
}

INLINE float group_amax(const float *x, i64 n)
{
    float a = 0;
    for (i64 i = 0; i < n; i++) a = MAX(a, fabsf(x[i]));
    return a;
}

/* Q8: each value as e4m3 with one power of two per 32 values, dequantised again */
static void round_to_q8(float *x, i64 n)
{
    for (i64 g = 0; g < n; g += 32) {
        i64 len = MIN(32, n - g);
        uint8_t byte = ue8m0_code(MAX(group_amax(x + g, len), 1e-4f), 448.0f);
        float down = ue8m0_float(254 - byte), up = ue8m0_float(byte);
        for (i64 i = g; i < g + len; i++)
            x[i] = e4m3_float(e4m3_code(MIN(MAX(x[i] * down, -448.0f), 448.0f))) * up;
    }
}

/* bytes of the values and of the scales of one record (K2.4-2.6); 4D or 2D and 0 where it is not packed */
static void record_bytes(int kind, i64 dim, i64 *data, i64 *scales)
{
    *data = kind == F32 ? 4 * dim : kind == BF16 ? 2 * dim : kind == FP8 ? dim : (dim + 1) / 2;
    *scales = kind == FP8 || kind == FP4_INDEX ? (dim + 31) / 32 : kind == FP4_KV ? (dim + 15) / 16 : 0;
}

/* one record from `dim` floats; data and scales may lie apart */
static void encode(const float *x, i64 dim, int kind, uint8_t *data, uint8_t *scales)
{
    if (kind == F32) { memcpy(data, x, 4 * dim); return; }
    if (kind == BF16) {
        for (i64 i = 0; i < dim; i++) {
            uint16_t h = float_bits(round_bf16(x[i])) >> 16;
            memcpy(data + 2 * i, &h, 2);
        }
        return;
    }
    if (kind == FP8) {
        for (i64 g = 0; g < dim; g += 32) {
            i64 len = MIN(32, dim - g);
            uint8_t byte = ue8m0_code(MAX(group_amax(x + g, len), 1e-4f), 448.0f);
            float down = ue8m0_float(254 - byte);
            for (i64 i = g; i < g + len; i++) data[i] = e4m3_code(MIN(MAX(x[i] * down, -448.0f), 448.0f));
            scales[g / 32] = byte;
        }
        return;
    }
    i64 group = kind == FP4_KV ? 16 : 32;
    memset(data, 0, (dim + 1) / 2);
    for (i64 g = 0; g < dim; g += group) {
        i64 len = MIN(group, dim - g);
        float amax = group_amax(x + g, len);
        if (kind == FP4_KV) { /* scale e4m3, nearest; true division */
            uint8_t code = e4m3_code(MIN(MAX(amax / 6.0f, 0x1p-9f), 448.0f));
            float s = e4m3_float(code);
            for (i64 i = g; i < g + len; i++) data[i / 2] |= e2m1_code(x[i] / s) << (i % 2 * 4);
            scales[g / group] = code;
        } else {
            uint8_t byte = ue8m0_code(MAX(amax, 6.0f * 0x1p-126f), 6.0f);
            float down = ue8m0_float(254 - byte);
            for (i64 i = g; i < g + len; i++) data[i / 2] |= e2m1_code(x[i] * down) << (i % 2 * 4);
            scales[g / group] = byte;
        }
    }
}

/* VW bytes as integers */
INLINE vi widen_bytes(const uint8_t *p)
{
#if VW == 16
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VW == 8
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return (vi){p[0], p[1], p[2], p[3]};
#endif
}

/* VW e2m1 codes, low nibble first, as floats */
INLINE vf e2m1_lanes(const uint8_t *p)
{
#if VW == 16
    uint32_t u[2];
    memcpy(u, p, 8);
    const vi shift = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    __m512i word = _mm512_inserti64x4(_mm512_set1_epi32((int)u[0]), _mm256_set1_epi32((int)u[1]), 1);
    return (vf)_mm512_permutexvar_ps((__m512i)((vi)word >> shift & 15), (__m512)vload(E2M1));
#elif VW == 8
    uint32_t u;
    memcpy(&u, p, 4);
    const vi shift = {0, 4, 8, 12, 16, 20, 24, 28};
    vi code = ((vi){0} + (int32_t)u) >> shift & 15;
    return (vf)((vi)_mm256_permutevar8x32_ps((__m256)vload(E2M1), (__m256i)code) | (code & 8) << 28);
#else
    return (vf){E2M1[p[0] & 15], E2M1[p[0] >> 4], E2M1[p[1] & 15], E2M1[p[1] >> 4]};
#endif
}

INLINE vf e4m3_lanes(const uint8_t *p)
{
    vi u = widen_bytes(p);
    return (vf)(((u & 0x80) << 24) | ((u & 0x7f) << 20)) * 0x1p120f;
}

static void decode(const uint8_t *data, const uint8_t *scales, i64 dim, int kind, float *out)
{
    if (kind == F32) { memcpy(out, data, 4 * dim); return; }
    if (kind == BF16) {
        for (i64 i = 0; i < dim; i++) {
            uint16_t h;
            memcpy(&h, data + 2 * i, 2);
            out[i] = bits_float((uint32_t)h << 16);
        }
        return;
    }
    i64 group = kind == FP4_KV ? 16 : 32;
    for (i64 g = 0; g < dim; g += group) { /* VW divides the group */
        i64 i = g, end = MIN(g + group, dim);
        float s = kind == FP4_KV ? e4m3_float(scales[g / group]) : ue8m0_float(scales[g / group]);
        for (; i + VW <= end; i += VW)
            vstore(out + i, (kind == FP8 ? e4m3_lanes(data + i) : e2m1_lanes(data + i / 2)) * s);
        for (; i < end; i++)
            out[i] = (kind == FP8 ? e4m3_float(data[i]) : E2M1[(data[i / 2] >> (i % 2 * 4)) & 15]) * s;
    }
}

/* A cache: `per_block` records share a block whose values come first and whose scales follow (index keys); 1 means
 * that a record's bytes lie together. */
typedef struct { uint8_t *data; int32_t kind, per_block; i64 dim; } Pool;

INLINE void record_at(const Pool *pool, i64 slot, uint8_t **data, uint8_t **scales)
{
    i64 db, sb;
    record_bytes(pool->kind, pool->dim, &db, &sb);
    uint8_t *block = pool->data + slot / pool->per_block * pool->per_block * (db + sb);
    i64 at = slot % pool->per_block;
    *data = block + at * db;
    *scales = block + pool->per_block * db + at * sb;
}

INLINE void read_record(const Pool *pool, i64 slot, float *out)
{
    uint8_t *data, *scales;
    record_at(pool, slot, &data, &scales);
    decode(data, scales, pool->dim, pool->kind, out);
}

/* ------------------------------------------------------------------------------------------------------ linears */

/* A weight (rows, cols) as it is stored. FP8 and FP4 have UE8M0 scales, one per `block_rows` x 32 values. `quantizes`:
 * it was stored quantised, so `served` quantises what it is multiplied with. */
typedef struct {
    const void *data;
    const uint8_t *scales;
    int32_t kind, block_rows;
    i64 rows, cols;
    int32_t quantizes;
} Weight;

INLINE const uint8_t *scale_row(const Weight *w, i64 n)
{
    return w->scales + n / w->block_rows * ((w->cols + 31) / 32);
}

/* VW values of row n from column k on (k a multiple of VW, so that one scale covers them) */
INLINE vf load_weight(const Weight *w, int kind, i64 n, i64 k)
{
    if (kind == F32) return vload((const float *)w->data + n * w->cols + k);
    if (kind == BF16) {
        vh h;
        memcpy(&h, (const uint16_t *)w->data + n * w->cols + k, sizeof h);
        return (vf)(__builtin_convertvector(h, vi) << 16);
    }
    float s = ue8m0_float(scale_row(w, n)[k / 32]);
    if (kind == FP8) return e4m3_lanes((const uint8_t *)w->data + n * w->cols + k) * s;
    return e2m1_lanes((const uint8_t *)w->data + n * (w->cols / 2) + k / 2) * s;
}

/* the last values of a row, fewer than VW, zeros behind them */
INLINE vf load_weight_part(const Weight *w, int kind, i64 n, i64 k)
{
    float v[VW] = {0};
    for (i64 i = k; i < w->cols; i++) {
        if (kind == F32) v[i - k] = ((const float *)w->data)[n * w->cols + i];
        else if (kind == BF16) v[i - k] = bits_float((uint32_t)((const uint16_t *)w->data)[n * w->cols + i] << 16);
        else {
            float s = ue8m0_float(scale_row(w, n)[i / 32]);
            if (kind == FP8) v[i - k] = e4m3_float(((const uint8_t *)w->data)[n * w->cols + i]) * s;
            else v[i - k] = E2M1[(((const uint8_t *)w->data)[n * (w->cols / 2) + i / 2] >> (i % 2 * 4)) & 15] * s;
        }
    }
    return vload(v);
}

#define BLOCK_ROWS 4
#define BLOCK_COLS (VW == 16 ? 4 : 2)

/* y[r, c] = x[r] . w[n + c] for R rows and N columns. A sum runs over the lanes in steps of VW, whatever R and N. */
INLINE void dot_block(int R, int N, int kind, const float *x, i64 ldx, const Weight *w, i64 n, float *y, i64 ldy)
{
    vf acc[8][8];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < N; c++) acc[r][c] = (vf){0};
    i64 cols = w->cols, whole = cols / VW * VW;
    /* the weights may come from memory: ask for later rows early, but for none that another thread reads */
    const float *ahead = (const float *)w->data + (n + 8 + N <= w->rows ? n + 8 : n) * cols;
    for (i64 k = 0; k < whole; k += VW) {
        vf b[8];
#pragma GCC unroll 8
        for (int c = 0; c < N; c++) {
            b[c] = load_weight(w, kind, n + c, k);
            if (kind == F32) __builtin_prefetch(ahead + c * cols + k, 0, 3);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vf a = vload(x + r * ldx + k);
#pragma GCC unroll 8
            for (int c = 0; c < N; c++) acc[r][c] += a * b[c];
        }
    }
    if (whole < cols)
        for (int c = 0; c < N; c++) {
            vf b = load_weight_part(w, kind, n + c, whole);
            for (int r = 0; r < R; r++) acc[r][c] += vload_part(x + r * ldx + whole, cols - whole) * b;
        }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < N; c++) y[r * ldy + c] = lane_sum(acc[r][c]);
}

/* T rows against N columns, N one of 8, BLOCK_COLS, 1 (8: at most two rows) */
INLINE void dot_rows(int kind, const float *x, i64 ldx, i64 T, const Weight *w, i64 n, int N, float *y, i64 ldy)
{
    for (; T >= BLOCK_ROWS; T -= BLOCK_ROWS, x += BLOCK_ROWS * ldx, y += BLOCK_ROWS * ldy)
        if (N == BLOCK_COLS) dot_block(BLOCK_ROWS, BLOCK_COLS, kind, x, ldx, w, n, y, ldy);
        else dot_block(BLOCK_ROWS, 1, kind, x, ldx, w, n, y, ldy);
    for (; T >= 2; T -= 2, x += 2 * ldx, y += 2 * ldy)
        if (N == 8) dot_block(2, 8, kind, x, ldx, w, n, y, ldy);
        else if (N == BLOCK_COLS) dot_block(2, BLOCK_COLS, kind, x, ldx, w, n, y, ldy);
        else dot_block(2, 1, kind, x, ldx, w, n, y, ldy);
    if (!T) return;
    if (N == 8) dot_block(1, 8, kind, x, ldx, w, n, y, ldy);
    else if (N == BLOCK_COLS) dot_block(1, BLOCK_COLS, kind, x, ldx, w, n, y, ldy);
    else dot_block(1, 1, kind, x, ldx, w, n, y, ldy);
}

static void dot_rows_f32(const float *x, i64 ldx, i64 T, const Weight *w, i64 n, int N, float *y, i64 ldy)
{
    dot_rows(F32, x, ldx, T, w, n, N, y, ldy);
}
static void dot_rows_bf16(const float *x, i64 ldx, i64 T, const Weight *w, i64 n, int N, float *y, i64 ldy)
{
    dot_rows(BF16, x, ldx, T, w, n, N, y, ldy);
}
static void dot_rows_fp8(const float *x, i64 ldx, i64 T, const Weight *w, i64 n, int N, float *y, i64 ldy)
{
    dot_rows(FP8, x, ldx, T, w, n, N, y, ldy);
}
static void dot_rows_fp4(const float *x, i64 ldx, i64 T, const Weight *w, i64 n, int N, float *y, i64 ldy)
{
    dot_rows(FP4, x, ldx, T, w, n, N, y, ldy);
}

/* rows n .. n + N of a weight as floats */
static void restore_rows(const Weight *w, i64 n, int N, float *out)
{
    i64 whole = w->cols / VW * VW;
    for (int c = 0; c < N; c++, out += w->cols) {
        for (i64 k = 0; k < whole; k += VW)
            vstore(out + k, w->kind == BF16  ? load_weight(w, BF16, n + c, k)
                            : w->kind == FP8 ? load_weight(w, FP8, n + c, k)
                                             : load_weight(w, FP4, n + c, k));
        vf part = load_weight_part(w, w->kind, n + c, whole);
        memcpy(out + whole, &part, 4 * (w->cols - whole));
    }
}

/* Columns [first, last) of y = x W^T. Few rows read the weight where it is; for many rows, a panel of it is restored
 * to floats once: the same floats, so the same sums. */
static void linear_columns(
    const float *x, i64 ldx, i64 T, const Weight *whole, i64 first, i64 last, float *y, i64 ldy)
{
    Weight part = *whole, *w = &part;
    part.rows = last;
    const i64 tile = 64; /* rows of x that stay in the second-level cache */
    const int step = T == 1 || (T == 2 && VW == 16) ? 8 : BLOCK_COLS;
    float *panel = w->kind != F32 && T > BLOCK_ROWS ? scratch(SCRATCH_PANEL, 4 * w->cols * 8) : NULL;
    for (i64 t = 0; t < T; t += tile) {
        i64 rows = MIN(tile, T - t);
        const float *xt = x + t * ldx;
        for (i64 n = first; n < last;) {
            int N = last - n >= step ? step : last - n >= BLOCK_COLS ? BLOCK_COLS : 1;
            float *yt = y + t * ldy + (n - first);
            if (panel) {
                Weight restored = {panel, NULL, F32, 1, N, w->cols, 0};
                restore_rows(w, n, N, panel);
                dot_rows_f32(xt, ldx, rows, &restored, 0, N, yt, ldy);
            } else if (w->kind == F32) dot_rows_f32(xt, ldx, rows, w, n, N, yt, ldy);
            else if (w->kind == BF16) dot_rows_bf16(xt, ldx, rows, w, n, N, yt, ldy);
            else if (w->kind == FP8) dot_rows_fp8(xt, ldx, rows, w, n, N, yt, ldy);
            else dot_rows_fp4(xt, ldx, rows, w, n, N, yt, ldy);
            n += N;
        }
    }
}

static void round_columns(float *y, i64 ldy, i64 T, i64 cols)
{
    for (i64 t = 0; t < T; t++)
        for (i64 n = 0; n < cols; n++) y[t * ldy + n] = round_bf16(y[t * ldy + n]);
}

/* rows of x to rows of `out`: norms, and quantised inputs */
typedef struct {
    const float *x;
    i64 ldx, n, groups;
    const float *w;
    float eps;
    int served;
    float *out;
    i64 ldo;
} RowTask;

static void quantize_task(const void *arguments, i64 t)
{
    const RowTask *a = arguments;
    i64 n = a->n * a->groups;
    float *out = a->out + t * n;
    memcpy(out, a->x + t * a->ldx, 4 * n);
    for (i64 g = 0; g < a->groups; g++) round_to_q8(out + g * a->n, a->n);
}

/* rows of `groups` blocks of n values, each block in Q8 by itself; the caller frees them */
static float *quantized(const float *x, i64 ldx, i64 T, i64 groups, i64 n)
{
    RowTask a = {.x = x, .ldx = ldx, .n = n, .groups = groups, .out = memory(4 * T * groups * n)};
    for_each(T, T * groups * n > SERIAL_BELOW, quantize_task, &a);
    return a.out;
}

/* y = x W^T, (T, rows of W), rounded to bfloat16 where `round` says so. Groups: row block g of W reads column block g
 * of x (3.8); one group is a plain linear. */
typedef struct { const float *x; i64 ldx, T, groups, columns; const Weight *w; int round; float *y; } LinearTask;

/* output columns of one task: long runs of memory for each thread, but a few tasks more than threads, so that one that
 * is late does not hold up the rest for long */
INLINE i64 columns_per_task(i64 columns)
{
    i64 even = columns / (4 * di_threads) / 4 * 4;
    return MAX(32, even);
}

static void linear_task(const void *arguments, i64 task)
{
    const LinearTask *a = arguments;
    i64 rows = a->w->rows, per_group = rows / a->groups, chunks = (per_group + a->columns - 1) / a->columns;
    i64 g = task / chunks, first = g * per_group + task % chunks * a->columns;
    i64 last = MIN(first + a->columns, (g + 1) * per_group);
    linear_columns(a->x + g * a->w->cols, a->ldx, a->T, a->w, first, last, a->y + first, rows);
    if (a->round) round_columns(a->y + first, rows, a->T, last - first);
}

/* the loop of a linear in chunks of `columns` */
static Loop linear_loop(const LinearTask *a)
{
    i64 per_group = a->w->rows / a->groups;
    return (Loop){linear_task, a, a->T ? a->groups * ((per_group + a->columns - 1) / a->columns) : 0};
}

/* `served`: quantise the input of a weight that was stored quantised, and `round` the result */
static void linear(const float *x, i64 ldx, i64 T, const Weight *w, i64 groups, int quantize, int round, float *y)
{
    float *q8 = quantize && w->quantizes ? quantized(x, ldx, T, groups, w->cols) : NULL;
    i64 columns = columns_per_task(w->rows / groups);
    LinearTask a = {q8 ? q8 : x, q8 ? groups * w->cols : ldx, T, groups, columns, w, round, y};
    Loop loop = linear_loop(&a);
    for_each_of(&loop, 1, T * w->rows * w->cols > SERIAL_BELOW);
    free(q8);
}

void di_linear(const float *x, i64 ldx, i64 T, const Weight *w, i64 groups, int quantize, int round, float *y)
{
    linear(x, ldx, T, w, groups, quantize, round, y);
}

/* ---------------------------------------------------------------------------- norms and streams (2.2, 2.3, 7.1) */

INLINE float square_sum(const float *x, i64 n)
{
    vf acc = {0};
    i64 whole = n / VW * VW;
    for (i64 i = 0; i < whole; i += VW) { vf v = vload(x + i); acc += v * v; }
    if (whole < n) { vf v = vload_part(x + whole, n - whole); acc += v * v; }
    return lane_sum(acc);
}

/* out = x / sqrt(mean(x^2) + eps) * w; x and out may be the same */
INLINE void rms_row(const float *x, i64 n, const float *w, float eps, int served, float *out)
{
    float s = 1.0f / sqrtf(square_sum(x, n) / n + eps);
    for (i64 i = 0; i < n; i++) out[i] = x[i] * s * w[i];
    if (served)
        for (i64 i = 0; i < n; i++) out[i] = round_bf16(out[i]);
}

static void norm_task(const void *arguments, i64 t)
{
    const RowTask *a = arguments;
    rms_row(a->x + t * a->ldx, a->n, a->w, a->eps, a->served, a->out + t * a->ldo);
}

void di_rms_norm(const float *x, i64 ldx, i64 T, i64 n, const float *w, float eps, int served, float *out)
{
    RowTask a = {.x = x, .ldx = ldx, .n = n, .w = w, .eps = eps, .served = served, .out = out, .ldo = n};
    for_each(T, T * n > SERIAL_BELOW, norm_task, &a);
}

/* out[j] = sum_c p[c] x[c, j] */
INLINE void mix_row(const float *x, const float *p, i64 C, i64 M, int served, float *out)
{
    for (i64 j = 0; j < M; j++) out[j] = p[0] * x[j];
    for (i64 c = 1; c < C; c++)
        for (i64 j = 0; j < M; j++) out[j] += p[c] * x[c * M + j];
    if (served)
        for (i64 j = 0; j < M; j++) out[j] = round_bf16(out[j]);
}

void di_mix_streams(const float *x, const float *pre, i64 T, i64 C, i64 M, int served, float *out)
{
    for (i64 t = 0; t < T; t++) mix_row(x + t * C * M, pre + t * C, C, M, served, out + t * M);
}

/* rows by softmax, then columns; then both, iters - 1 times; b is (C, C), source x destination */
static void sinkhorn(float *b, i64 C, i64 iters, float eps)
{
    for (i64 i = 0; i < C; i++) {
        float peak = b[i * C], total = 0;
        for (i64 j = 1; j < C; j++) peak = MAX(peak, b[i * C + j]);
        for (i64 j = 0; j < C; j++) total += b[i * C + j] = exp1(b[i * C + j] - peak);
        for (i64 j = 0; j < C; j++) b[i * C + j] = b[i * C + j] / total + eps;
    }
    for (i64 n = 0; n < iters; n++) {
        if (n)
            for (i64 i = 0; i < C; i++) {
                float total = 0;
                for (i64 j = 0; j < C; j++) total += b[i * C + j];
                for (i64 j = 0; j < C; j++) b[i * C + j] /= total + eps;
            }
        for (i64 j = 0; j < C; j++) {
            float total = 0;
            for (i64 i = 0; i < C; i++) total += b[i * C + j];
            for (i64 i = 0; i < C; i++) b[i * C + j] /= total + eps;
        }
    }
}

/* A sub-layer's mixing weights and constants (2.3). `di_hc_post` writes the last sub-layer's output to the streams,
 * with its post (T, C) and comb (T, C, C); `di_hc_pre` gives the next one's input u (T, M), through the carried
 * pre-mix, and its own pre, post and comb. */
typedef struct {
    const float *fn, *base, *scale, *norm; /* ((2 + C) C, C M), ((2 + C) C), (3), (M) */
    float eps, norm_eps, rms_eps;
    int32_t iters, served;
    i64 C, M;
} Seam;

INLINE void post_row(const Seam *s, const float *y, const float *x, const float *post, const float *comb, float *out)
{
    i64 C = s->C, M = s->M;
    for (i64 j = 0; j < C; j++) {
        float *o = out + j * M;
        for (i64 m = 0; m < M; m++) o[m] = comb[j] * x[m];
        for (i64 i = 1; i < C; i++)
            for (i64 m = 0; m < M; m++) o[m] += comb[i * C + j] * x[i * M + m];
        for (i64 m = 0; m < M; m++) o[m] = post[j] * y[m] + o[m];
        if (s->served)
            for (i64 m = 0; m < M; m++) o[m] = round_bf16(o[m]);
    }
}

INLINE void mix_coefficients(const Seam *s, const float *x, float *mix, float *pre, float *post, float *comb)
{
    i64 C = s->C, width = C * s->M;
    float r = 1.0f / sqrtf(square_sum(x, width) / width + s->norm_eps);
    for (i64 c = 0; c < (2 + C) * C; c++) mix[c] *= r;
    for (i64 c = 0; c < C; c++) {
        pre[c] = sigmoid1(mix[c] * s->scale[0] + s->base[c]) + s->eps;
        post[c] = 2.0f * sigmoid1(mix[C + c] * s->scale[1] + s->base[C + c]);
    }
    for (i64 i = 0; i < C * C; i++) comb[i] = mix[2 * C + i] * s->scale[2] + s->base[2 * C + i];
    sinkhorn(comb, C, s->iters, s->eps);
}

typedef struct {
    const Seam *s;
    const float *x, *pre_in, *y;
    float *mix, *u, *pre, *post, *comb, *out;
} SeamTask;

static void post_task(const void *arguments, i64 t)
{
    const SeamTask *a = arguments;
    i64 C = a->s->C, M = a->s->M;
    post_row(a->s, a->y + t * M, a->x + t * C * M, a->post + t * C, a->comb + t * C * C, a->out + t * C * M);
}

void di_hc_post(const Seam *s, const float *y, const float *x, float *post, float *comb, i64 T, float *out)
{
    SeamTask a = {.s = s, .x = x, .y = y, .post = post, .comb = comb, .out = out};
    for_each(T, T * s->C * s->C * s->M > SERIAL_BELOW, post_task, &a);
}

enum { SEAM_COLUMNS = 4 };

/* a few of the (2 + C) C products of one row */
static void seam_product_task(const void *arguments, i64 task)
{
    const SeamTask *a = arguments;
    i64 C = a->s->C, M = a->s->M, rows = (2 + C) * C, blocks = (rows + SEAM_COLUMNS - 1) / SEAM_COLUMNS;
    i64 t = task / blocks, n = task % blocks * SEAM_COLUMNS;
    Weight fn = {a->s->fn, NULL, F32, 1, rows, C * M, 0};
    linear_columns(a->x + t * C * M, C * M, 1, &fn, n, MIN(n + SEAM_COLUMNS, rows), a->mix + t * rows + n, rows);
}

static void seam_row_task(const void *arguments, i64 t)
{
    const SeamTask *a = arguments;
    const Seam *s = a->s;
    i64 C = s->C, M = s->M;
    const float *x = a->x + t * C * M;
    float *u = a->u + t * M;
    mix_coefficients(s, x, a->mix + t * (2 + C) * C, a->pre + t * C, a->post + t * C, a->comb + t * C * C);
    mix_row(x, a->pre_in + t * C, C, M, s->served, u);
    rms_row(u, M, s->norm, s->rms_eps, s->served, u);
}

void di_hc_pre(const Seam *s, const float *x, const float *pre_in, i64 T, float *u, float *pre, float *post, float *comb)
{
    i64 C = s->C, M = s->M, rows = (2 + C) * C, blocks = (rows + SEAM_COLUMNS - 1) / SEAM_COLUMNS;
    float *mix = memory(4 * T * rows);
    SeamTask a = {s, x, pre_in, NULL, mix, u, pre, post, comb, NULL};
    for_each(T * blocks, T * rows * C * M > SERIAL_BELOW, seam_product_task, &a);
    for_each(T, T * rows * C * M > SERIAL_BELOW, seam_row_task, &a);
    free(mix);
}

/* both: the streams go from x to `out`, the mix from (pre, post, comb) to the same with 2 */
void di_hc_seam(
    const Seam *s, const float *y, const float *x, const float *pre, float *post, float *comb, i64 T, float *out,
    float *u, float *pre2, float *post2, float *comb2)
{
    di_hc_post(s, y, x, post, comb, T, out);
    di_hc_pre(s, out, pre, T, u, pre2, post2, comb2);
}

/* ------------------------------------------------------------------------- rotation and row epilogues (3.1, 3.2) */

/* rotate the last 2R of D values, interleaved pairs, in place */
INLINE void rotate_row(float *x, i64 D, const float *cos, const float *sin, i64 R, int inverse, int served)
{
    float *p = x + D - 2 * R;
    for (i64 i = 0; i < R; i++) {
        float a = p[2 * i], b = p[2 * i + 1], s = inverse ? -sin[i] : sin[i];
        p[2 * i] = rounded(a * cos[i] - b * s, served);
        p[2 * i + 1] = rounded(b * cos[i] + a * s, served);
    }
}

/* cos and sin of position x frequency, (T, R); the product is a float32 product */
void di_rotation(const i64 *positions, const float *frequencies, i64 T, i64 R, float *cos_out, float *sin_out)
{
    for (i64 i = 0; i < T * R; i++) {
        float angle = (float)positions[i / R] * frequencies[i % R];
        cos_out[i] = cosf(angle);
        sin_out[i] = sinf(angle);
    }
}

/* (T, H, D) to (T, H, D), each head of a row by the row's angles */
typedef struct {
    const float *x, *norm, *cos, *sin;
    i64 ldx, H, D, R;
    float eps;
    int inverse, served, kind;
    const Pool *pool;
    const i64 *slots;
    float *out;
} RotateTask;

INLINE void copy_rounded(float *out, const float *x, i64 n, int served)
{
    if (served)
        for (i64 i = 0; i < n; i++) out[i] = round_bf16(x[i]);
    else memcpy(out, x, 4 * n);
}

static void rotate_task(const void *arguments, i64 t)
{
    const RotateTask *a = arguments;
    float *out = a->out + t * a->H * a->D;
    if (out != a->x + t * a->ldx) copy_rounded(out, a->x + t * a->ldx, a->H * a->D, a->served);
    for (i64 h = 0; h < a->H; h++)
        rotate_row(out + h * a->D, a->D, a->cos + t * a->R, a->sin + t * a->R, a->R, a->inverse, a->served);
}

void di_rotate(
    const float *x, i64 ldx, i64 T, i64 H, i64 D, const float *cos, const float *sin, i64 R, int inverse, int served,
    float *out)
{
    RotateTask a = {
        .x = x, .cos = cos, .sin = sin, .ldx = ldx, .H = H, .D = D, .R = R, .inverse = inverse, .served = served,
        .out = out};
    for_each(T, T * H * D > SERIAL_BELOW, rotate_task, &a);
}

/* norm (weight NULL: none), rotate, encode: a record per row. With `slots` records go to those rows of the pool, else
 * to row t. Window keys, entries and index keys differ in their pool's format only. */
static void record_task(const void *arguments, i64 t)
{
    const RotateTask *a = arguments;
    float *row = scratch(SCRATCH_ROW, 4 * a->D);
    uint8_t *data, *scales;
    if (a->norm) rms_row(a->x + t * a->ldx, a->D, a->norm, a->eps, a->served, row);
    else copy_rounded(row, a->x + t * a->ldx, a->D, a->served);
    rotate_row(row, a->D, a->cos + t * a->R, a->sin + t * a->R, a->R, 0, a->served);
    record_at(a->pool, a->slots ? a->slots[t] : t, &data, &scales);
    encode(row, a->D, a->pool->kind, data, scales);
}

void di_records(
    const float *x, i64 ldx, i64 T, const float *norm, float eps, const float *cos, const float *sin, i64 R, int served,
    const Pool *pool, const i64 *slots)
{
    RotateTask a = {
        .x = x, .norm = norm, .cos = cos, .sin = sin, .ldx = ldx, .D = pool->dim, .R = R, .eps = eps,
        .served = served, .pool = pool, .slots = slots};
    for_each(T, T * pool->dim * 4 > SERIAL_BELOW, record_task, &a);
}

/* copy records of this step into their rows of a ring */
void di_store_rows(const uint8_t *records, i64 bytes, const i64 *source, const i64 *slots, i64 n, uint8_t *pool)
{
    for (i64 i = 0; i < n; i++) memcpy(pool + slots[i] * bytes, records + source[i] * bytes, bytes);
}

/* Ratio 2 (3.3): pool each completed pair by the softmax of its gates, per channel, then keep this step's newest rows.
 * x (T, 2D): gates, then values. `row` and `partner` (N) as in step/inputs.py; state rows are [gate, value]. */
void di_pool_pairs(
    const float *x, i64 ldx, i64 D, const i64 *row, const i64 *partner, i64 N, const i64 *history, i64 X, float *state,
    const i64 *source, const i64 *slot, i64 writes, int served, float *out)
{
    for (i64 n = 0; n < N; n++) {
        i64 p = partner[n];
        const float *b = x + row[n] * ldx, *a = p <= X ? state + history[p - 1] * 2 * D : x + (p - 1 - X) * ldx;
        for (i64 d = 0; d < D; d += VW) {
            i64 len = MIN(VW, D - d);
            vf ga = vload_part(a + d, len), gb = vload_part(b + d, len), peak = vmax(ga, gb);
            vf ea = vexp(ga - peak), eb = vexp(gb - peak);
            vf v = (ea * vload_part(a + D + d, len) + eb * vload_part(b + D + d, len)) / (ea + eb);
            memcpy(out + n * D + d, &v, 4 * len);
        }
        if (served)
            for (i64 d = 0; d < D; d++) out[n * D + d] = round_bf16(out[n * D + d]);
    }
    for (i64 i = 0; i < writes; i++) memcpy(state + slot[i] * 2 * D, x + source[i] * ldx, 8 * D);
}

/* index queries (3.4): rotate each head and bring it to the index keys' precision */
static void index_query_task(const void *arguments, i64 t)
{
    const RotateTask *a = arguments;
    i64 db, sb, J = a->D;
    record_bytes(a->kind, J, &db, &sb);
    uint8_t *record = scratch(SCRATCH_ROW, db + sb);
    rotate_task(arguments, t);
    for (i64 h = 0; h < a->H; h++) {
        float *o = a->out + (t * a->H + h) * J;
        encode(o, J, a->kind, record, record + db);
        decode(record, record + db, J, a->kind, o);
    }
}

void di_index_queries(
    const float *x, i64 T, i64 H, i64 J, const float *cos, const float *sin, i64 R, int served, int kind, float *out)
{
    RotateTask a = {
        .x = x, .cos = cos, .sin = sin, .ldx = H * J, .H = H, .D = J, .R = R, .served = served, .kind = kind,
        .out = out};
    for_each(T, T * H * J * 4 > SERIAL_BELOW, index_query_task, &a);
}

/* ------------------------------------------------------------------------------------- sparse attention (3.6-3.8) */

typedef struct {
    const float *q, *sink, *cos, *sin;  /* (T, H, D), (H), (T, R) twice */
    const uint8_t *step;                /* records of this step's rows, in the window pool's format */
    const i64 *history, *window, *slots; /* (X) ring rows; (T, W) into [null | history | step]; (T, K) entry rows */
    const Pool *ring, *entries;         /* entries NULL: window only */
    i64 T, H, D, R, X, W, K;
    int32_t served;
    float *out; /* (T, H, D), rotated back */
} Attention;

/* keys of row t as floats, window first, in order; returns how many */
static i64 gather_keys(const Attention *a, i64 t, float *keys, i64 part, i64 parts)
{
    i64 db, sb, n = 0;
    record_bytes(a->ring->kind, a->D, &db, &sb);
    for (i64 w = 0; w < a->W; w++) {
        i64 at = a->window[t * a->W + w];
        if (!at) continue;
        float *out = keys + n++ * a->D;
        if ((n - 1) % parts != part) continue;
        if (at <= a->X) read_record(a->ring, a->history[at - 1], out);
        else {
            const uint8_t *record = a->step + (at - 1 - a->X) * (db + sb);
            decode(record, record + db, a->D, a->ring->kind, out);
        }
    }
    for (i64 k = 0; k < a->K; k++) {
        i64 slot = a->slots[t * a->K + k];
        if (!slot) continue;
        if (n++ % parts == part) read_record(a->entries, slot, keys + (n - 1) * a->D);
    }
    return n;
}

/* o[h, d..] of R heads, N vectors from d on: the keys times their weights l, added in order */
INLINE void weigh_keys(int R, int N, const float *l, i64 ld, const float *keys, i64 n, i64 D, i64 d, float *o)
{
    vf acc[4][4];
#pragma GCC unroll 4
    for (int h = 0; h < R; h++)
#pragma GCC unroll 4
        for (int c = 0; c < N; c++) acc[h][c] = (vf){0};
    i64 part = MIN(VW, D - d); /* less than a vector only where N is 1 */
    for (i64 i = 0; i < n; i++) {
        vf v[4];
#pragma GCC unroll 4
        for (int c = 0; c < N; c++) {
            const float *key = keys + i * D + d + c * VW;
            v[c] = N == 1 ? vload_part(key, part) : vload(key);
        }
#pragma GCC unroll 4
        for (int h = 0; h < R; h++)
#pragma GCC unroll 4
            for (int c = 0; c < N; c++) acc[h][c] += l[h * ld + i] * v[c];
    }
#pragma GCC unroll 4
    for (int h = 0; h < R; h++)
#pragma GCC unroll 4
        for (int c = 0; c < N; c++) memcpy(o + h * D + d + c * VW, &acc[h][c], 4 * (N == 1 ? part : VW));
}

/* heads [first, last) of row t: one softmax over all keys and the sink */
static void attend_heads(const Attention *a, i64 t, const float *keys, i64 n, i64 first, i64 last)
{
    i64 D = a->D, H = last - first, ld = n + VW;
    float *logits = scratch(SCRATCH_LOGITS, 4 * H * (ld + 1)), *total = logits + H * ld;
    float *out = a->out + (t * a->H + first) * D;
    Weight k = {keys, NULL, F32, 1, n, D, 0};
    linear_columns(a->q + (t * a->H + first) * D, D, H, &k, 0, n, logits, ld);
    float scale = 1.0f / sqrtf((float)D);
    for (i64 h = 0; h < H; h++) {
        float *l = logits + h * ld, sink = a->sink[first + h], peak = sink;
        for (i64 i = 0; i < n; i++) { l[i] *= scale; peak = MAX(peak, l[i]); }
        for (i64 i = n; i < n + VW; i++) l[i] = -INFINITY;
        vf sum = {0};
        for (i64 i = 0; i < n; i += VW) { vf e = vexp(vload(l + i) - peak); vstore(l + i, e); sum += e; }
        total[h] = lane_sum(sum) + exp1(sink - peak);
    }
    for (i64 h = 0; h < H;) {
        int R = H - h >= 4 ? 4 : 1;
        const float *l = logits + h * ld;
        float *o = out + h * D;
        for (i64 d = 0; d < D;) {
            int N = D - d >= 4 * VW ? 4 : 1;
            if (R == 4 && N == 4) weigh_keys(4, 4, l, ld, keys, n, D, d, o);
            else if (R == 4) weigh_keys(4, 1, l, ld, keys, n, D, d, o);
            else if (N == 4) weigh_keys(1, 4, l, ld, keys, n, D, d, o);
            else weigh_keys(1, 1, l, ld, keys, n, D, d, o);
            d += N * VW;
        }
        h += R;
    }
    for (i64 h = 0; h < H; h++) {
        float *o = out + h * D;
        for (i64 d = 0; d < D; d++) o[d] = rounded(o[d] / total[h], a->served);
        rotate_row(o, D, a->cos + t * a->R, a->sin + t * a->R, a->R, 1, a->served);
    }
}

/* all of row i */
static void attention_row_task(const void *arguments, i64 i)
{
    const Attention *a = arguments;
    float *keys = scratch(SCRATCH_KEYS, 4 * (a->W + a->K) * a->D);
    attend_heads(a, i, keys, gather_keys(a, i, keys, 0, 1), 0, a->H);
}

/* a part of one row: some of its keys, then some of its heads */
typedef struct { const Attention *a; i64 row, parts, keys_found; float *keys; } AttentionPart;

static void gather_task(const void *arguments, i64 part)
{
    const AttentionPart *p = arguments;
    gather_keys(p->a, p->row, p->keys, part, p->parts);
}

static void heads_task(const void *arguments, i64 part)
{
    const AttentionPart *p = arguments;
    i64 H = p->a->H;
    attend_heads(p->a, p->row, p->keys, p->keys_found, H * part / p->parts, H * (part + 1) / p->parts);
}

void di_attention(const Attention *a)
{
    if (a->T >= 2 * di_threads) {
        for_each(a->T, 1, attention_row_task, a);
        return;
    }
    for (i64 t = 0; t < a->T; t++) { /* few rows: all threads work on one */
        AttentionPart p = {a, t, MIN(a->H, 2 * di_threads), 0, scratch(SCRATCH_KEYS, 4 * (a->W + a->K) * a->D)};
        for (i64 w = 0; w < a->W; w++) p.keys_found += a->window[t * a->W + w] != 0;
        for (i64 k = 0; k < a->K; k++) p.keys_found += a->slots[t * a->K + k] != 0;
        int wide = p.keys_found * a->D * a->H > SERIAL_BELOW;
        if (!wide) p.parts = 1;
        for_each(p.parts, wide, gather_task, &p);
        for_each(p.parts, wide, heads_task, &p);
    }
}

/* An attention sub-layer from its input to its output (3.1, 3.7, 3.8): `di_latents` gives the normalised query latent
 * qa (T, Q) and the raw key-value kv (T, D); `di_attend` goes on from there. */
typedef struct {
    const Weight *wqkv_a, *wq_b, *wo_a, *wo_b;
    const float *q_norm, *kv_norm, *sink;
    float q_eps, kv_eps;
    i64 groups;
} AttentionWeights;

void di_latents(const AttentionWeights *w, const float *x, i64 ldx, i64 T, int served, float *qa, float *kv)
{
    i64 Q = w->wq_b->cols, width = w->wqkv_a->rows, D = width - Q;
    float *both = memory(4 * T * width);
    linear(x, ldx, T, w->wqkv_a, 1, served, served, both);
    RowTask a = {
        .x = both, .ldx = width, .n = Q, .w = w->q_norm, .eps = w->q_eps, .served = served, .out = qa, .ldo = Q};
    for_each(T, T * Q > SERIAL_BELOW, norm_task, &a);
    for (i64 t = 0; t < T; t++) memcpy(kv + t * D, both + t * width + Q, 4 * D);
    free(both);
}

/* `a` without its q, sink, step and out. Rows `source` of this step go to the rows `slots` of the ring, once all have
 * been read. */
void di_attend(
    const AttentionWeights *w, const Attention *a, const float *qa, i64 ld_qa, const float *kv, i64 ld_kv,
    const i64 *source, const i64 *slots, i64 writes, float *y)
{
    i64 T = a->T, H = a->H, D = a->D, R = a->R, db, sb;
    int served = a->served;
    record_bytes(a->ring->kind, D, &db, &sb);
    float *q = memory(4 * T * (2 * H * D + w->wo_a->rows)), *o = q + T * H * D, *z = o + T * H * D;
    uint8_t *step = memory(T * (db + sb));
    Pool records = {step, a->ring->kind, 1, D};
    Attention all = *a;
    all.q = q, all.sink = w->sink, all.step = step, all.out = o;
    linear(qa, ld_qa, T, w->wq_b, 1, served, served, q);
    di_rotate(q, H * D, T, H, D, a->cos, a->sin, R, 0, served, q);
    di_records(kv, ld_kv, T, w->kv_norm, w->kv_eps, a->cos, a->sin, R, served, &records, NULL);
    di_attention(&all);
    di_store_rows(step, db + sb, source, slots, writes, a->ring->data);
    linear(o, H * D, T, w->wo_a, w->groups, served, served, z);
    linear(z, w->wo_a->rows, T, w->wo_b, 1, served, served, y);
    free(step);
    free(q);
}

/* ---------------------------------------------------------------------------------- index selection (3.4 - 3.6) */

typedef struct {
    const float *q, *head_weight; /* (T, I, J), (T, I) with the scale in it */
    const i64 *positions;         /* (T) */
    const int32_t *block_table;   /* (S, B) */
    const i64 *cu_rows, *last;    /* (S + 1), (S) */
    const Pool *keys;
    const int32_t *candidates;    /* (T, candidate_count) block numbers, -1 padded; NULL: none */
    i64 T, S, I, J, B, per_block, ratio, K, candidate_count, candidate_size;
    i64 publish_count, publish_size; /* 0: publish nothing */
    int32_t served;
    int32_t *entries;             /* out (T, K) ascending, -1 padded */
    i64 *slots;                   /* out (T, K), 0 where there is none */
    int32_t *blocks;              /* out (T, publish_count) */
} Select;

enum { TILE = 128, ROWS = 16 };

INLINE i64 entry_slot(const Select *s, i64 sequence, i64 entry)
{
    return (i64)s->block_table[sequence * s->B + entry / s->per_block] * s->per_block + entry % s->per_block;
}

/* scores of some rows of one sequence against entries [first, last); heads are added in order */
static void score_tile(const Select *s, i64 sequence, i64 t0, i64 t1, i64 first, i64 last, float *score, i64 ld)
{
    float *keys = scratch(SCRATCH_KEYS, 4 * TILE * s->J), *dots = scratch(SCRATCH_LOGITS, 4 * s->I * TILE);
    for (i64 n = first; n < last; n++) read_record(s->keys, entry_slot(s, sequence, n), keys + (n - first) * s->J);
    Weight w = {keys, NULL, F32, 1, last - first, s->J, 0};
    for (i64 t = t0; t < t1; t++) {
        linear_columns(s->q + t * s->I * s->J, s->J, s->I, &w, 0, last - first, dots, TILE);
        float *out = score + (t - t0) * ld + first;
        for (i64 n = 0; n < last - first; n++) out[n] = 0;
        for (i64 i = 0; i < s->I; i++) {
            float weight = s->head_weight[t * s->I + i];
            for (i64 n = 0; n < last - first; n++) out[n] += weight * MAX(dots[i * TILE + n], 0.0f);
        }
        if (s->served)
            for (i64 n = 0; n < last - first; n++) out[n] = round_bf16(out[n]);
    }
}

/* floats as unsigned numbers of the same order; -0 counts as 0 */
INLINE uint32_t ordered(float x)
{
    uint32_t u = float_bits(x + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* Numbers of the k largest of n scores, ascending; of equal ones the smaller number wins. `allowed` (NULL: all) says
 * which take part. Returns how many were found, at most k. A radix search for the k-th score, then one pass. */
static i64 best(const float *score, const uint8_t *allowed, i64 n, i64 k, int32_t *out)
{
    i64 count = 0, found = 0;
    for (i64 i = 0; i < n; i++) count += !allowed || allowed[i];
    if (count <= k) { /* all of them: the scores do not matter, and need not exist */
        for (i64 i = 0; i < n; i++)
            if (!allowed || allowed[i]) out[found++] = (int32_t)i;
        return found;
    }
    uint32_t bound = 0, mask = 0;
    i64 equal = k; /* in the end: how many of the scores equal to the bound are taken */
    for (int shift = 24; shift >= 0; shift -= 8) {
        i64 histogram[256] = {0};
        for (i64 i = 0; i < n; i++) {
            uint32_t u = ordered(score[i]);
            if ((!allowed || allowed[i]) && (u & mask) == bound) histogram[u >> shift & 255]++;
        }
        int digit = 255;
        while (histogram[digit] < equal) equal -= histogram[digit--];
        bound |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    for (i64 i = 0; i < n; i++) {
        if (allowed && !allowed[i]) continue;
        uint32_t u = ordered(score[i]);
        if (u > bound || (u == bound && equal-- > 0)) out[found++] = (int32_t)i;
    }
    return found;
}

/* candidate blocks of one row (3.5): best score of each, the newest always, smaller block on ties */
static void publish_blocks(const Select *s, const float *score, i64 visible, int32_t *out)
{
    i64 size = s->publish_size, blocks = (visible + size - 1) / size, found = 0;
    if (blocks > 0) {
        float *top = scratch(SCRATCH_ROW, 4 * blocks);
        for (i64 b = 0; b < blocks; b++) {
            top[b] = score[b * size];
            for (i64 n = b * size + 1; n < MIN((b + 1) * size, visible); n++) top[b] = MAX(top[b], score[n]);
        }
        top[blocks - 1] = INFINITY;
        found = best(top, NULL, blocks, s->publish_count, out);
    }
    for (; found < s->publish_count; found++) out[found] = -1;
}

static void select_row(const Select *s, i64 sequence, i64 t, const float *score)
{
    i64 visible = (s->positions[t] + 1) / s->ratio, found = 0;
    int32_t *entries = s->entries + t * s->K;
    if (s->publish_count) publish_blocks(s, score, visible, s->blocks + t * s->publish_count);
    uint8_t *allowed = NULL;
    if (s->candidates && visible > 0) {
        allowed = scratch(SCRATCH_ROW, visible);
        memset(allowed, 0, visible);
        for (i64 c = 0; c < s->candidate_count; c++) {
            i64 b = s->candidates[t * s->candidate_count + c];
            if (b < 0) continue;
            for (i64 n = b * s->candidate_size; n < MIN((b + 1) * s->candidate_size, visible); n++) allowed[n] = 1;
        }
    }
    if (visible > 0) found = best(score, allowed, visible, s->K, entries);
    for (i64 k = 0; k < found; k++) s->slots[t * s->K + k] = entry_slot(s, sequence, entries[k]);
    for (; found < s->K; found++) { entries[found] = -1; s->slots[t * s->K + found] = 0; }
}

/* some rows of one sequence */
typedef struct { const Select *s; i64 sequence, first, rows, tiles, ld; float *score; } SelectPart;

static void score_task(const void *arguments, i64 task)
{
    const SelectPart *p = arguments;
    i64 a = task / p->tiles * ROWS, b = MIN(a + ROWS, p->rows), n = task % p->tiles * TILE;
    i64 seen = (p->s->positions[p->first + b - 1] + 1) / p->s->ratio; /* what the last of these rows can see */
    if (n >= seen) return;
    score_tile(p->s, p->sequence, p->first + a, p->first + b, n, MIN(n + TILE, seen), p->score + a * p->ld, p->ld);
}

static void select_task(const void *arguments, i64 i)
{
    const SelectPart *p = arguments;
    select_row(p->s, p->sequence, p->first + i, p->score ? p->score + i * p->ld : NULL);
}

void di_select(const Select *s)
{
    for (i64 q = 0; q < s->S; q++) {
        i64 begin = s->cu_rows[q], end = s->cu_rows[q + 1], count = (s->last[q] + 1) / s->ratio;
        if (begin == end) continue;
        int scored = count > 0 && (s->publish_count || count > s->K); /* else every visible entry is taken anyway */
        i64 at_once = scored ? MAX(ROWS, (16 << 20) / count) : end - begin; /* at most 64 MB of scores, or 16 rows */
        at_once = MIN(at_once, end - begin);
        float *score = scored ? memory(4 * count * at_once) : NULL;
        for (i64 t = begin; t < end; t += at_once) {
            i64 rows = MIN(at_once, end - t);
            SelectPart p = {s, q, t, rows, (count + TILE - 1) / TILE, count, score};
            int wide = rows * count * s->I * s->J > SERIAL_BELOW;
            if (scored) for_each((rows + ROWS - 1) / ROWS * p.tiles, wide, score_task, &p);
            for_each(rows, wide, select_task, &p);
        }
        free(score);
    }
}

/* ------------------------------------------------------------------------------------------- experts (4.1 - 4.3) */

/* Experts of each row from its router logits: k best biased scores, best first, smaller expert on ties; weights from
 * the unbiased scores. `image_bias` (NULL: none) replaces the bias where `is_image`. */
typedef struct {
    const float *logits, *bias, *image_bias;
    const uint8_t *is_image;
    i64 E, k;
    float scaling;
    i64 *ids;
    float *weights;
} RouteTask;

static void route_task(const void *arguments, i64 t)
{
    const RouteTask *a = arguments;
    const float *bias = a->image_bias && a->is_image[t] ? a->image_bias : a->bias;
    i64 E = a->E, *ids = a->ids + t * a->k;
    float *score = scratch(SCRATCH_ROW, 8 * E), *rank = score + E, *weights = a->weights + t * a->k, total = 0;
    for (i64 e = 0; e < E; e++) {
        float v = a->logits[t * E + e];
        score[e] = sqrtf(v > 20.0f ? v : log1pf(expf(v)));
        rank[e] = score[e] + bias[e];
    }
    for (i64 j = 0; j < a->k; j++) {
        i64 top = -1;
        for (i64 e = 0; e < E; e++)
            if (!isnan(rank[e]) && (top < 0 || rank[e] > rank[top])) top = e;
        if (top < 0) top = 0; /* every score is NaN: so was the router's input */
        ids[j] = top;
        weights[j] = score[top];
        total += score[top];
        rank[top] = NAN;
    }
    for (i64 j = 0; j < a->k; j++) weights[j] = a->scaling * weights[j] / MAX(total, 1e-20f);
}

void di_route(
    const float *logits, i64 T, i64 E, const float *bias, const float *image_bias, const uint8_t *is_image, i64 k,
    float scaling, i64 *ids, float *weights)
{
    RouteTask a = {logits, bias, image_bias, is_image, E, k, scaling, ids, weights};
    for_each(T, T * E * 16 > SERIAL_BELOW, route_task, &a);
}

/* h[i] = silu(min(a, limit)) * clamp(b, limit) * weight, for `F` gate values and as many up values behind them */
static void activate(const float *gate_up, i64 F, float limit, float weight, int served, float *h)
{
    for (i64 i = 0; i < F; i += VW) {
        i64 len = MIN(VW, F - i);
        vf a = vload_part(gate_up + i, len), b = vload_part(gate_up + F + i, len), lim = {0};
        lim += limit;
        a = vmin(a, lim);
        b = vmin(vmax(b, -lim), lim);
        vf v = a / (1.0f + vexp(-a)) * b * weight;
        memcpy(h + i, &v, 4 * len);
    }
    if (served) round_to_q8(h, F);
}

/* The chosen experts of every row (4.3): `ids` (T, A), NULL for the one shared expert; out (T, A, M). Pairs of (row,
 * slot) are sorted by expert; each expert's rows are then products of their own. Weights: gate rows then up rows of
 * each expert (E * 2F, M), down rows (E * M, F). Where they were stored quantised, `served` brings x to FP8, and the
 * activation between the products. */
typedef struct {
    const float *x, *weights;
    const i64 *ids;
    const Weight *gate_up, *down;
    i64 T, A, E, F, M;
    float limit;
    int32_t served;
    float *out;
} Experts;

static Weight rows_of(const Weight *w, i64 first, i64 rows)
{
    i64 bytes = w->kind == F32 ? 4 * w->cols : w->kind == BF16 ? 2 * w->cols : w->kind == FP8 ? w->cols : w->cols / 2;
    Weight part = *w;
    part.data = (const uint8_t *)w->data + first * bytes;
    if (w->scales) part.scales = scale_row(w, first);
    part.rows = rows;
    return part;
}

/* experts at work. Rows of the pairs sorted by expert: x (M), gate_up (2F), h (F), y (M); `start` of each expert's */
typedef struct {
    const Experts *p;
    i64 *order, *start, *expert, used, total, columns;
    float *x, *gate_up, *h, *y;
} ExpertTask;

static void expert_gather_task(const void *arguments, i64 n)
{
    const ExpertTask *a = arguments;
    i64 M = a->p->M;
    memcpy(a->x + n * M, a->p->x + a->order[n] / a->p->A * M, 4 * M);
}

/* some output columns of one expert, for all its rows */
static void expert_product(
    const ExpertTask *a, i64 task, const Weight *all, i64 rows, const float *x, i64 width, float *y)
{
    i64 chunks = (rows + a->columns - 1) / a->columns, e = a->expert[task / chunks];
    i64 n = task % chunks * a->columns, end = MIN(n + a->columns, rows);
    i64 first = a->start[e], count = a->start[e + 1] - first;
    Weight w = rows_of(all, e * rows, rows);
    linear_columns(x + first * width, width, count, &w, n, end, y + first * rows + n, rows);
    if (a->p->served) round_columns(y + first * rows + n, rows, count, end - n);
}

static void expert_up_task(const void *arguments, i64 task)
{
    const ExpertTask *a = arguments;
    expert_product(a, task, a->p->gate_up, 2 * a->p->F, a->x, a->p->M, a->gate_up);
}

static void expert_activate_task(const void *arguments, i64 n)
{
    const ExpertTask *a = arguments;
    const Experts *p = a->p;
    float weight = p->weights ? p->weights[a->order[n]] : 1.0f;
    int quantizes = p->served && p->gate_up->quantizes;
    activate(a->gate_up + n * 2 * p->F, p->F, p->limit, weight, quantizes, a->h + n * p->F);
}

static void expert_down_task(const void *arguments, i64 task)
{
    const ExpertTask *a = arguments;
    expert_product(a, task, a->p->down, a->p->M, a->h, a->p->F, a->y);
}

static void expert_scatter_task(const void *arguments, i64 n)
{
    const ExpertTask *a = arguments;
    i64 M = a->p->M;
    memcpy(a->p->out + a->order[n] * M, a->y + n * M, 4 * M);
}

static int experts_wide(const ExpertTask *a) { return a->total * a->p->F * a->p->M > SERIAL_BELOW; }

/* one short step per pair, shared out only where there are many */
static void for_each_pair(const ExpertTask *a, Body body)
{
    for_each(a->total, experts_wide(a) && a->total > 16, body, a);
}

/* sort the pairs and gather their rows */
static ExpertTask begin_experts(const Experts *p)
{
    i64 pairs = p->T * p->A, F = p->F, M = p->M, E = p->E;
    i64 *order = memory(sizeof(i64) * (pairs + 3 * E + 1)), *start = order + pairs;
    i64 *expert = start + E + 1, *next = expert + E;
    float *x = memory(4 * pairs * (3 * F + 2 * M)), *gate_up = x + pairs * M, *h = gate_up + pairs * 2 * F;
    ExpertTask a = {p, order, start, expert, 0, 0, 0, x, gate_up, h, h + pairs * F};
    memset(start, 0, sizeof(i64) * (E + 1));
    for (i64 i = 0; i < pairs; i++) {
        i64 e = p->ids ? p->ids[i] : 0;
        if (e < 0) memset(p->out + i * M, 0, 4 * M);
        else start[e + 1]++;
    }
    for (i64 e = 0; e < E; e++) {
        if (start[e + 1]) expert[a.used++] = e;
        start[e + 1] += start[e];
    }
    memcpy(next, start, sizeof(i64) * E);
    for (i64 i = 0; i < pairs; i++) { /* each expert's pairs in (row, slot) order */
        i64 e = p->ids ? p->ids[i] : 0;
        if (e >= 0) order[next[e]++] = i;
    }
    a.total = start[E];
    for_each_pair(&a, expert_gather_task);
    return a;
}

/* the loop over chunks of `columns` of every expert in use */
static Loop expert_loop(ExpertTask *a, Body body, i64 rows, i64 columns)
{
    a->columns = MIN(rows, columns);
    return (Loop){body, a, a->used * ((rows + a->columns - 1) / a->columns)};
}
static Loop up_loop(ExpertTask *a, i64 columns) { return expert_loop(a, expert_up_task, 2 * a->p->F, columns); }
static Loop down_loop(ExpertTask *a, i64 columns) { return expert_loop(a, expert_down_task, a->p->M, columns); }

static void end_experts(ExpertTask *a)
{
    for_each_pair(a, expert_scatter_task);
    free(a->x);
    free(a->order);
}

static void run_experts(const Experts *p)
{
    ExpertTask a = begin_experts(p);
    Loop up = up_loop(&a, columns_per_task(a.used * 2 * p->F));
    for_each_of(&up, 1, experts_wide(&a));
    for_each_pair(&a, expert_activate_task);
    Loop down = down_loop(&a, columns_per_task(a.used * p->M));
    for_each_of(&down, 1, experts_wide(&a));
    end_experts(&a);
}

void di_experts(const Experts *p)
{
    Experts q = *p;
    float *q8 = p->served && p->gate_up->quantizes ? quantized(p->x, p->M, p->T, 1, p->M) : NULL;
    if (q8) q.x = q8;
    run_experts(&q);
    free(q8);
}

/* shared first, then the slots in order (K3) */
typedef struct { const float *shared, *routed; i64 A, M; int served; float *out; } CombineTask;

static void combine_task(const void *arguments, i64 t)
{
    const CombineTask *c = arguments;
    i64 M = c->M;
    float *o = c->out + t * M;
    memcpy(o, c->shared + t * M, 4 * M);
    for (i64 a = 0; a < c->A; a++)
        for (i64 m = 0; m < M; m++) o[m] += c->routed[(t * c->A + a) * M + m];
    if (c->served)
        for (i64 m = 0; m < M; m++) o[m] = round_bf16(o[m]);
}

void di_combine(const float *shared, const float *routed, i64 T, i64 A, i64 M, int served, float *out)
{
    CombineTask a = {shared, routed, A, M, served, out};
    for_each(T, T * A * M > SERIAL_BELOW, combine_task, &a);
}

/* The whole mixture of one layer (4): router, shared expert, routed experts, their sum. Products that do not wait for
 * each other share a loop. */
typedef struct {
    const Weight *gate, *gate_up, *down, *shared_gate_up, *shared_down;
    const float *bias, *image_bias;
    i64 E, F, shared_F, A;
    float scaling, limit;
} Mixture;

void di_mixture(
    const Mixture *w, const float *x, i64 T, const uint8_t *is_image, int served, i64 *ids, float *weights, float *y)
{
    i64 E = w->E, A = w->A, M = w->gate->cols;
    float *logits = memory(4 * T * (E + M + A * M)), *shared_out = logits + T * E, *routed_out = shared_out + T * M;
    int any = w->gate->quantizes || w->gate_up->quantizes || w->shared_gate_up->quantizes;
    float *q8 = served && any ? quantized(x, M, T, 1, M) : NULL;
    LinearTask gate = {q8 && w->gate->quantizes ? q8 : x, M, T, 1, 0, w->gate, 0, logits};
    Experts shared = {
        q8 && w->shared_gate_up->quantizes ? q8 : x, NULL, NULL, w->shared_gate_up, w->shared_down, T, 1, 1,
        w->shared_F, M, w->limit, served, shared_out};
    Experts routed = {
        q8 && w->gate_up->quantizes ? q8 : x, weights, ids, w->gate_up, w->down, T, A, E, w->F, M, w->limit, served,
        routed_out};

    ExpertTask s = begin_experts(&shared);
    gate.columns = columns_per_task(E + 2 * w->shared_F);
    Loop first[] = {up_loop(&s, gate.columns), linear_loop(&gate)};
    for_each_of(first, 2, experts_wide(&s));
    di_route(logits, T, E, w->bias, w->image_bias, is_image, A, w->scaling, ids, weights);
    for_each_pair(&s, expert_activate_task);

    ExpertTask r = begin_experts(&routed);
    i64 columns = columns_per_task(r.used * 2 * w->F + M);
    Loop second[] = {up_loop(&r, columns), down_loop(&s, columns)};
    for_each_of(second, 2, experts_wide(&r));
    for_each_pair(&r, expert_activate_task);

    Loop third = down_loop(&r, columns_per_task(r.used * M));
    for_each_of(&third, 1, experts_wide(&r));
    end_experts(&s);
    end_experts(&r);
    di_combine(shared_out, routed_out, T, A, M, served, y);
    free(q8);
    free(logits);
}

/* --------------------------------------------------------------------------------------------------- Engram (5.5) */

/* X[c] + gate[c] * value; kv (T, (C + 1) M): a key per stream, then the value. Closed for image rows. */
void di_engram_gate(
    const float *x, const float *kv, const float *qw, const float *kw, const uint8_t *is_image, i64 T, i64 C, i64 M,
    float eps, int served, float *out)
{
    for (i64 i = 0; i < T * C; i++) {
        i64 t = i / C, c = i % C, whole = M / VW * VW;
        const float *xr = x + i * M, *key = kv + (t * (C + 1) + c) * M, *value = kv + (t * (C + 1) + C) * M;
        const float *q = qw + c * M, *k = kw + c * M;
        vf acc = {0};
        for (i64 m = 0; m < whole; m += VW) acc += vload(xr + m) * vload(q + m) * vload(k + m) * vload(key + m);
        if (whole < M) {
            i64 n = M - whole;
            acc += vload_part(xr + whole, n) * vload_part(q + whole, n) * vload_part(k + whole, n)
                 * vload_part(key + whole, n);
        }
        float rx = 1.0f / sqrtf(square_sum(xr, M) / M + eps), rk = 1.0f / sqrtf(square_sum(key, M) / M + eps);
        float s = lane_sum(acc) * rx * rk / sqrtf((float)M);
        float gate = is_image[t] ? 0.0f : sigmoid1(copysignf(sqrtf(MAX(fabsf(s), 1e-6f)), s));
        for (i64 m = 0; m < M; m++) out[i * M + m] = rounded(xr[m] + gate * value[m], served);
    }
}
