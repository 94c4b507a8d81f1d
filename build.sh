#!/usr/bin/env bash
# Checks what a platform needs and installs exactly its packages from this checkout.
#
#   DEEPINFER_ACCELERATOR=cpu|nvidia|ascend ./build.sh [--dry-run] [-- PIP OPTIONS...]
#
#   cpu      core and the command; a C compiler for the CPU kernels
#   nvidia   the same, expert placement and the NVIDIA kernels; a driver for CUDA 13, SM90 or newer
#   ascend   the same, expert placement and the Ascend kernels; CANN 9.2, a device
#
#   PYTHON=...   the interpreter to install for (default: python3), best of an environment of its own
#
# Every need is told with what was found. Exit code: 0 installed (or would be), 1 a need is not met or
# the installation failed, 2 wrong usage.
set -uo pipefail

accelerators="cpu nvidia ascend"
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
dry_run=no
pip_options=()
unmet=0

usage_error() { echo "build.sh: $1" >&2; exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry_run=yes ;;
        --help | -h) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --) shift; pip_options=("$@"); break ;;
        *) usage_error "unknown argument '$1'; allowed: --dry-run, --help, and pip's options after --" ;;
    esac
    shift
done

report() { # report STATUS WHAT FOUND NEEDED [REMEDY]
    printf '%-8s %-10s found: %s; needed: %s%s\n' "$1" "$2" "$3" "$4" "${5:+; $5}"
    [ "$1" != missing ] || unmet=$((unmet + 1))
}

at_least() { # at_least FOUND NEEDED: compares versions such as 3.11 part by part
    [ -n "$1" ] && [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

check_system() {
    local system
    system="$(uname -s 2>/dev/null) $(uname -m 2>/dev/null)"
    case $system in
        Linux*) report ok system "$system" Linux ;;
        *) report missing system "${system# }" Linux "use a Linux machine" ;;
    esac
}

check_python() {
    local version
    version=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null)
    if ! at_least "$version" 3.11; then
        report missing python "${version:-no $python}" ">= 3.11" "name one in PYTHON=/path/to/python"
    elif ! "$python" -m pip --version >/dev/null 2>&1; then
        report missing python "$version without pip" ">= 3.11 with pip" "make an environment: $python -m venv"
    else
        report ok python "$version ($(command -v "$python"))" ">= 3.11 with pip"
    fi
}

check_compiler() { # without one the CPU runs on torch; Triton cannot do without
    local compiler="" name line version kind=gcc oldest=9 status=warning
    local remedy="install gcc >= 9 or clang >= 10, or name one in CC; without it the CPU runs on torch, several times slower"
    [ "$accelerator" = cpu ] || { status=missing; remedy="install gcc >= 9 or clang >= 10, or name one in CC"; }
    for name in ${CC:-cc gcc clang}; do
        compiler=$(command -v "$name") && break
    done
    [ -n "$compiler" ] || { report $status compiler "none (looked for ${CC:-cc gcc clang})" "gcc >= 9 or clang >= 10" "$remedy"; return; }
    line=$("$compiler" --version 2>/dev/null | head -n 1)
    case $line in *clang*) kind=clang oldest=10 ;; esac
    version=$(printf '%s\n' "$line" | grep -oE '[0-9]+\.[0-9]+(\.[0-9]+)?' | tail -n 1)
    if at_least "$version" $oldest; then
        report ok compiler "$kind $version ($compiler)" "gcc >= 9 or clang >= 10"
    else
        report $status compiler "$kind ${version:-of unknown version} ($compiler), too old" "gcc >= 9 or clang >= 10" "$remedy"
    fi
}

check_torch() { # pip's choice on Linux is a CUDA build
    local torch
    torch=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null)
    case $torch in
        '') report warning torch "not installed: pip may take a CUDA build of several GB" "any build >= 2.9" \
            "for a CPU build: ./build.sh -- --extra-index-url <index of CPU builds>, or --find-links <folder with the wheel>" ;;
        *) report ok torch "$torch" "any build >= 2.9" ;;
    esac
}

check_nvidia() {
    local cuda device capability listed torch
    if ! command -v nvidia-smi >/dev/null 2>&1; then
        report missing driver "no nvidia-smi" "an NVIDIA driver for CUDA 13" "install the driver"
        return
    fi
    cuda=$(nvidia-smi 2>/dev/null | grep -oE 'CUDA [A-Za-z ]*Version: *[0-9]+\.[0-9]+' | grep -oE '[0-9.]+$' | head -n 1)
    if at_least "$cuda" 13.0; then
        report ok cuda "driver for CUDA $cuda" "CUDA >= 13.0"
    else
        report missing cuda "${cuda:+driver for CUDA }${cuda:-a driver that does not answer}" "CUDA >= 13.0" "update the driver"
    fi
    torch=$("$python" -c 'import torch; print(torch.version.cuda or "none")' 2>/dev/null)
    case $torch in
        '') report ok torch "not installed, pip takes a CUDA build" "a build for CUDA >= 13.0" ;;
        none) report missing torch "a build without CUDA" "a build for CUDA >= 13.0" "install one first" ;;
        *) at_least "$torch" 13.0 && report ok torch "built for CUDA $torch" "a build for CUDA >= 13.0" ||
            report warning torch "built for CUDA $torch" "a build for CUDA >= 13.0" "untried; install one for 13.0" ;;
    esac
    listed=$(nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2>/dev/null)
    capability=$(printf '%s\n' "$listed" | cut -d, -f1 | sort -V | head -n 1)
    device=$(printf '%s\n' "$listed" | head -n 1 | cut -d, -f2)
    if at_least "$capability" 9.0; then
        report ok device "$(printf '%s\n' "$listed" | grep -c .) x${device} (compute capability $capability)" "capability >= 9.0"
    else
        report missing device "${device:-none}${capability:+ (compute capability $capability)}" "capability >= 9.0 (Hopper)" "use SM90 or newer, or install for the cpu"
    fi
}

check_ascend() {
    local home=${ASCEND_HOME_PATH:-${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit/latest}} file version="" nodes
    # the toolkit's own record; the versions of its parts are numbered otherwise
    for file in "$home"/ascend_toolkit_install.info "$home"/*/ascend_toolkit_install.info; do
        [ -z "$version" ] && [ -f "$file" ] || continue
        version=$(grep -oE '^version=[0-9]+\.[0-9]+(\.[0-9]+)?' "$file" | head -n 1)
        version=${version#version=}
    done
    if [ -z "$version" ] && [ -f "$home/version.cfg" ]; then
        version=$(grep -oE 'CANN-[0-9]+\.[0-9]+(\.[0-9]+)?' "$home/version.cfg" | head -n 1)
        version=${version#CANN-}
    fi
    if at_least "$version" 9.2; then
        report ok cann "CANN $version ($home)" "CANN >= 9.2"
    else
        report missing cann "${version:+CANN }${version:-none in $home}" "CANN >= 9.2" "install it and source its set_env.sh"
    fi
    nodes=$(ls "${DEV:-/dev}" 2>/dev/null | grep -cE '^davinci[0-9]+$')
    if [ "$nodes" -gt 0 ]; then
        report ok device "$nodes Ascend devices" "at least 1"
    else
        report missing device "none (no ${DEV:-/dev}/davinci0)" "at least 1" "install the Ascend driver"
    fi
    if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch_npu") is None)' 2>/dev/null; then
        report ok torch_npu installed "the release that matches torch"
    else
        report missing torch_npu none "the release that matches torch" "$python -m pip install torch_npu==<torch's version>"
    fi
}

accelerator=${DEEPINFER_ACCELERATOR:-}
if [ -z "$accelerator" ]; then
    accelerator=cpu
    echo "build.sh: DEEPINFER_ACCELERATOR is not set, so this is for the cpu; allowed: $accelerators"
fi
packages=(core cli)
case $accelerator in
    cpu) ;;
    nvidia) packages+=(moe kernels-nvidia) ;;
    ascend) packages+=(moe kernels-ascend) ;;
    *)
        case $accelerator in
            [Aa]* | *[Nn][Pp][Uu]* | *[Cc][Aa][Nn][Nn]*) near=ascend ;;
            [Nn]* | *[Cc][Uu][Dd][Aa]* | *[Gg][Pp][Uu]*) near=nvidia ;;
            *) near=cpu ;;
        esac
        usage_error "DEEPINFER_ACCELERATOR: found '$accelerator', allowed: $accelerators; did you mean $near?"
        ;;
esac

check_system
check_python
check_compiler
[ "$accelerator" != cpu ] || check_torch
[ "$accelerator" != nvidia ] || check_nvidia
[ "$accelerator" != ascend ] || check_ascend

command=("$python" -m pip install ${pip_options[@]+"${pip_options[@]}"})
for name in "${packages[@]}"; do
    command+=("$here/packages/deepinfer-$name")
done
printf 'command  '
printf ' %q' "${command[@]}"
printf '\n'
if [ "$unmet" -gt 0 ]; then
    echo "build.sh: $unmet of the needs of '$accelerator' are not met; nothing was installed" >&2
    exit 1
fi
if [ "$dry_run" = yes ]; then
    echo "build.sh: dry run, nothing was installed"
    exit 0
fi
"${command[@]}" || { echo "build.sh: pip failed; what it said is above" >&2; exit 1; }
echo "build.sh: installed for '$accelerator'; \`deepinfer doctor\` tells what runs"
