# A machine with NVIDIA GPUs: docker build -t pedigree . && docker run --gpus all --shm-size 16g -v "$PWD":/project -it pedigree
# CUDA comes with the lock's wheels; the host gives the driver, through the NVIDIA container toolkit. Kernels that are compiled
# at run time use the lock's nvcc.
# The devcontainer is this first stage, in which `make setup` installs the CPU lock.
FROM python:3.11-slim-bookworm AS system

RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap g++ git make tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 pedigree

FROM system

COPY requirements/gpu.txt requirements/dev.txt /tmp/requirements/
RUN python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --no-deps "$(grep ^setuptools== /tmp/requirements/gpu.txt)" \
    && /venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation -r /tmp/requirements/gpu.txt -r /tmp/requirements/dev.txt \
    && rm -rf /tmp/requirements

ENV PATH=/venv/bin:$PATH \
    CUDA_HOME=/venv/lib/python3.11/site-packages/nvidia/cu13 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    DO_NOT_TRACK=1 \
    DVC_NO_ANALYTICS=1 \
    GX_ANALYTICS_ENABLED=false \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    VLLM_NO_USAGE_STATS=1

# The code is installed where it lies: with a clone mounted over /project, edits take effect and artifacts stay on the host.
WORKDIR /project
COPY . .
RUN /venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
    && chown -R pedigree /project \
    && git config --system --add safe.directory /project

# A process of its own at the head reaps what jobs leave behind, and passes signals on.
USER pedigree
ENTRYPOINT ["tini", "--"]
CMD ["pedigree", "--help"]
