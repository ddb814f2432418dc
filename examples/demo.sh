# The main job, on this machine. Run by `make demo`.
set -e
say() { printf '\n$ %s\n' "$*"; "$@"; }

mkdir -p out
say wavetrain plan llama2-7b dgx-h100:8 --global-batch 512 -o out/llama.json
say wavetrain simulate out/llama.json --trace out/planned.json
say wavetrain demo -o out/demo
