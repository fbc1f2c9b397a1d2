#!/usr/bin/env bash
# Names all that the set-up needs and this machine lacks, with the command that installs it.
# Usage: check.sh PYTHON DEVICE
set -u
python=$1
case $2 in cpu) gigabytes=10 ;; *) gigabytes=25 ;; esac
problems=() debian=() fedora=()

missing() { # WHAT PACKAGES_OF_DEBIAN PACKAGES_OF_FEDORA
    problems+=("$1")
    debian+=("$2")
    fedora+=("$3")
}

command -v git >/dev/null || missing "git" git git
command -v c++ >/dev/null || missing "a C++ compiler (c++), for the kernels that torch compiles" g++ gcc-c++

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
case $version in
    3.11 | 3.12 | 3.13)
        headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
        [ -e "$headers/Python.h" ] || missing "the headers of Python $version" "python$version-dev" "python$version-devel"
        "$python" -c 'import ensurepip, venv' 2>/dev/null || missing "the module venv of Python $version" "python$version-venv" "python$version"
        ;;
    *)
        for offered in python3.11 python3.12 python3.13; do
            apt-cache show $offered >/dev/null 2>&1 && break
        done
        missing "Python 3.11, 3.12 or 3.13 ($python is ${version:-not found}; name another one by \`make setup PYTHON=...\`)" \
            "$offered $offered-dev $offered-venv" "python3.13 python3.13-devel"
        ;;
esac

free=$(($(df -Pk . | awk 'END {print $4}') / 1000000))
[ -e .venv ] || [ "$free" -ge "$gigabytes" ] || problems+=("$gigabytes GB of free disk space here ($free GB available)")

[ ${#problems[@]} -gt 0 ] || exit 0
echo "This machine lacks:" >&2
printf '  - %s\n' "${problems[@]}" >&2
if [ ${#debian[@]} -gt 0 ]; then
    echo "Debian, Ubuntu:  sudo apt-get install ${debian[*]}" >&2
    echo "Fedora:          sudo dnf install ${fedora[*]}" >&2
fi
exit 1
