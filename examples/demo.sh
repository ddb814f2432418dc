# What Wavetrain does so far of its main job, on this machine. Run by `make demo`.
set -e
say() { printf '\n$ %s\n' "$*"; "$@"; }

say wavetrain describe llama3-8b
say wavetrain describe dgx-h100:32
mkdir -p out
say wavetrain schedule --kind wave-zb --ranks 4 --microbatches 8 --svg out/wave-zb.svg
say wavetrain plan llama2-7b dgx-h100:8 --global-batch 512 -o out/plan.json
say wavetrain simulate out/plan.json --trace out/planned.json
say wavetrain simulate --model llama2-70b --cluster dgx-h100:8 --tp 8 --sequence-parallel --pp 4 --waves 2 \
    --global-batch 128 --zero1 --trace out/simulated.json -o out/by-hand.json
say wavetrain plan examples/small.yaml dgx-h100:1 --global-batch 8 --pp 2 --dp 1 --tp 1 --schedule wave --waves 2 \
    --microbatch 2 --precision fp32 -o out/small.json
say wavetrain train out/small.json --local 2 --steps 20 -o out/run
say wavetrain validate validation/published.csv --html out/validation.html
say wavetrain describe examples/lab.yaml
say python examples/own_module.py
say wavetrain doctor
