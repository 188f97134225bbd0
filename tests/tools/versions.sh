#!/usr/bin/env bash
# Runs the default tests and the three default runs with other versions of Python and of the packages,
# each set in an environment of its own, and prints the rows of the table in RESULTS.md.
#
#     tests/tools/versions.sh [NAME ...]      all sets, or those with these names
#
# VERSIONS is the folder of the environments, up to 6 GB each with CUDA builds (default: a new one).
# A Python is looked for as python3.12 and so on, and among those of pyenv.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
folder=${VERSIONS:-$(mktemp -d)}

# name, Python, and what differs from requirements.txt; -NAME leaves a package out
sets() {
    cat << END
pinned-3.11 3.11
pinned-3.12 3.12
pinned-3.13 3.13
oldest 3.12 torch==2.11.0 transformers==5.17.0
newest 3.11 torch==2.14.1 transformers==5.24.0 peft==0.21.2
megatron-0.17 3.13 megatron-core==0.17.1
megatron-0.18 3.13 megatron-core==0.18.2
megatron-0.19 3.13 megatron-core==0.19.2
no-megatron 3.13 -megatron-core
END
}

python() { # the interpreter of this version
    # one of pyenv's stand-ins may be there and not work
    if "python$1" -V &> /dev/null; then echo "python$1"; else ls -d ~/.pyenv/versions/"$1".*/bin/python | tail -1; fi
}

build() { # NAME PYTHON CHANGES...: an environment with these packages
    local home=$folder/$1 list=$folder/$1.txt
    [ -d "$home" ] || "$(python "$2")" -m venv "$home"
    cp requirements.txt "$list"
    for change in "${@:3}"; do
        name=${change#-}
        sed -i "/^${name%%==*}==/d" "$list"
        [ "${change#-}" != "$change" ] || echo "$change" >> "$list"
    done
    "$home/bin/python" -m pip install -q -r "$list" > "$folder/$1.pip.log" 2>&1
}

try() { # NAME: the row of this set
    local home=$folder/$1 ends="" out=$folder/$1.out
    versions=$("$home/bin/python" -m pip list 2> /dev/null | awk '$1 ~ /^(torch|transformers|megatron[-_]core)$/ {print $1, $2}' | paste -sd ';')
    "$home/bin/python" -m pytest -q tests > "$folder/$1.tests.log" 2>&1 || true
    tests=$(tail -1 "$folder/$1.tests.log")
    for script in critic_fsdp critic_megatron ppo_loop; do
        if "$home/bin/python" $script.py --out-dir "$out/$script" > "$folder/$1.$script.log" 2>&1; then
            ends="$ends ok"
        else
            ends="$ends $(tail -1 "$folder/$1.$script.log")"
        fi
    done
    echo "| $1 | $("$home/bin/python" -V | cut -d' ' -f2) | $versions | ${tests//=/} |$ends |"
}

echo "| set | Python | packages | default tests | critic_fsdp, critic_megatron, ppo_loop |"
echo "|---|---|---|---|---|"
sets | while read -r line; do
    read -r -a words <<< "$line"
    if [ $# = 0 ] || [[ " $* " == *" ${words[0]} "* ]]; then
        build "${words[@]}" && try "${words[0]}" < /dev/null
    fi
done
echo "logs in $folder"
