#!/usr/bin/env bash
# Azure's storage emulator for tests/storage, into .cache. Without Node.js those tests skip and say so.
set -euo pipefail
cd "$(dirname "$0")/.."

version=3.37.0
folder=.cache/azurite
[ -x "$folder/node_modules/.bin/azurite-blob" ] && exit 0
command -v npm >/dev/null 2>&1 || exit 0
echo "setup: Azurite $version into $folder"
mkdir -p "$folder"
npm install --silent --no-audit --no-fund --no-update-notifier --prefix "$folder" "azurite@$version" >/dev/null 2>&1 || {
  rm -rf "$folder"
  echo "setup: npm could not install it; the tests that need it will skip" >&2
}
