#!/usr/bin/env bash
# Makes .venv with the exact versions of requirements/dev.lock. Does nothing when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=".venv/.serai-$(cat requirements/dev.lock pyproject.toml scripts/setup.sh | cksum | tr ' ' '-')"
[ -e "$stamp" ] && exit 0

good() { # whether $1 is a Python that can make the environment
  command -v "$1" >/dev/null 2>&1 &&
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
  good "$PYTHON" || {
    echo "PYTHON=$PYTHON is no Python 3.11 to 3.14 with the venv module; leave PYTHON out to have one found" >&2
    exit 1
  }
else
  for candidate in python3 python3.11 python3.12 python3.13 python3.14; do
    if good "$candidate"; then
      PYTHON=$candidate
      break
    fi
  done
  [ -n "${PYTHON:-}" ] || {
    echo "serai needs Python 3.11 to 3.14 with the venv module, and found none:" >&2
    echo "  python3 is: $(python3 --version 2>&1 || true)" >&2
    echo "  next:       install one (Debian: apt install python3 python3-venv), or: make setup PYTHON=/path/to/python3" >&2
    exit 1
  }
fi

echo "setup: .venv with $("$PYTHON" --version) and requirements/dev.lock (a few minutes the first time)"
rm -f .venv/.serai-*
[ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null || { rm -rf .venv && "$PYTHON" -m venv .venv; }

# torch is pinned in the command as well: no other requirement may ever pull in a second, larger build.
torch=$(grep -E '^torch==' requirements/dev.lock)
.venv/bin/python -m pip install -qq --disable-pip-version-check \
  --constraint requirements/dev.lock "$torch" --editable '.[all,dev]'
touch "$stamp"
