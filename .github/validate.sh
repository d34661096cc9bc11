#!/usr/bin/env bash
# The step of action.yml: its inputs, which stand in variables, become the words of one `dsrun validate`.
set -euo pipefail

words=(--format github)
[ -z "${DEEPSPEED_VERSION:-}" ] || words+=(--deepspeed-version "$DEEPSPEED_VERSION")
[ -z "${TARGET:-}" ] || words+=(--for "$TARGET")
case "${STRICT:-false}" in
    true) words+=(--strict) ;;
    false) ;;
    *) echo "strict: true or false, not $STRICT" >&2 && exit 2 ;;
esac
while IFS= read -r line; do
    [ -z "$line" ] || words+=("$line")
done <<<"${ARGUMENTS:-}"
files=()
while IFS= read -r line; do
    [ -z "$line" ] || files+=("$line")
done <<<"${FILES:-}"
((${#files[@]})) || { echo "files: name a config or a folder" >&2 && exit 2; }
exec "${DSRUN:-$RUNNER_TEMP/dsrun/bin/dsrun}" validate "${words[@]}" -- "${files[@]}"
