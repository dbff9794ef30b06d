#!/bin/bash
# Creates the virtual environment and installs the locked packages and this project. `make` calls it; it needs only Python 3.11.
# Usage: requirements/install.sh PYTHON VENV [EXTRA_INDEX_URL]
set -euo pipefail
python=$1 venv=$2 index=${3:-}

say() { printf '%s\n' "$*" >&2; }

check_python() {
    if ! "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        say "Python 3.11 is needed, and '$1' is not it (the versions in requirements/lock.txt are tested for 3.11)."
        say "  Debian, Ubuntu:  apt-get install python3.11 python3.11-venv     Fedora, RHEL:  dnf install python3.11"
        say "  without root:    uv python install 3.11, pyenv install 3.11, or conda create -n py311 python=3.11"
        say "  elsewhere:       make quickstart PYTHON=/path/to/python3.11"
        exit 1
    fi
    if ! "$1" -c 'import venv, ensurepip' 2>/dev/null; then
        say "'$1' has no venv module. Debian, Ubuntu:  apt-get install python3.11-venv"
        exit 1
    fi
}

# One line per stage, and a counter on a terminal, in place of pip's thousand lines.
progress() {
    awk -v total="$1" -v tty="$2" '
        /^Collecting |^Processing |^Requirement already satisfied/ { count++; if (tty) { printf "\r\033[K      %d packages, now %s", count, $2; fflush() } }
        /^ *Downloading .*\(([0-9.]+ GB|[0-9][0-9][0-9][0-9.]* MB)\)/ { printf "%s      downloading %s\n", tty ? "\r\033[K" : "", $2 " " $3 $4; fflush() }
        /^Installing collected packages/ { printf "%s      unpacking (the longest silence: about a minute)\n", tty ? "\r\033[K" : ""; fflush() }
    '
}

if [ ! -x "$venv/bin/python" ]; then
    check_python "$python"
    say "[1/3] creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
else
    check_python "$venv/bin/python"
    say "[1/3] $venv is there"
fi

total=$(grep -c == requirements/lock.txt)
tty=0
if [ -t 1 ]; then tty=1; fi
say "[2/3] installing $total pinned packages from requirements/lock.txt: 2 to 5 minutes, once"
"$venv/bin/python" -m pip install --progress-bar off ${index:+--extra-index-url "$index"} -r requirements/lock.txt | progress "$total" "$tty"
say "[3/3] installing megatron-autotune itself, editable"
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
