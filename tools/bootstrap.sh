#!/bin/sh
# Makes a small virtual environment that holds hatch: bootstrap.sh FOLDER [PYTHON]
# Without PYTHON it takes the first interpreter that is new enough and can make environments.
set -eu
folder=$1
candidates=${2:-python3.11 python3 python3.12 python3.13 python3.14 python}

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

for python in $candidates; do
    if usable "$python"; then
        echo "bootstrap: $("$python" --version) ($python)" >&2
        rm -rf "$folder"
        "$python" -m venv "$folder"
        "$folder/bin/python" -m pip install --quiet 'hatch>=1.18'
        exit 0
    fi
done
echo "bootstrap: no usable Python among: $candidates" >&2
echo "bootstrap: needed is Python >= 3.11 with venv (on Debian and Ubuntu: the package python3-venv);" >&2
echo "bootstrap: name another one with make PYTHON=/path/to/python ..." >&2
exit 1
