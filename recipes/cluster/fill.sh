#!/usr/bin/env bash
# fill.sh TEMPLATE BIND DIR HOST...: the run file on stdout, with these in the place of @BIND@, @DIR@, @HOST0@, @HOST1@, ...
set -euo pipefail

template="$1" bind="$2" dir="$3"
shift 3
text="$(cat "${template}")"
text="${text//@BIND@/${bind}}"
text="${text//@DIR@/${dir}}"
number=0
for host in "$@"; do
  text="${text//@HOST${number}@/${host}}"
  number=$((number + 1))
done
if left="$(grep -o '@[A-Z0-9]*@' <<<"${text}" | head -1)" && [[ -n "${left}" ]]; then
  echo "fill.sh: nothing was given for ${left} of ${template}" >&2
  exit 2
fi
printf '%s\n' "${text}"
