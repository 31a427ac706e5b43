# retrain with vLLM on NVIDIA GPUs. CI has no Docker and does not build this file.
#   docker build -t retrain .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD":/work -v retrain-cache:/cache retrain train run.toml
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

# A compiler and Python's headers are for kernels that torch.compile and vLLM build; bubblewrap is for the tool `python`.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/retrain/bin:$PATH \
    HF_HOME=/cache/huggingface \
    RETRAIN_CACHE=/cache/retrain \
    PIP_NO_CACHE_DIR=1
WORKDIR /opt/src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY configs configs
COPY docs/skill.md docs/skill.md
COPY retrain retrain
# vLLM decides which torch is installed: each of its releases works with one.
RUN python3 -m venv /opt/retrain && pip install '.[vllm,lora,math,serve]'

WORKDIR /work
ENTRYPOINT ["retrain"]
CMD ["--help"]
