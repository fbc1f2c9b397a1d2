# A machine with NVIDIA GPUs: docker build -t pedigree:gpu . && docker run --gpus all --shm-size 16g -v "$PWD":/project -it pedigree:gpu bash
# One without: docker build --build-arg DEVICE=cpu -t pedigree:cpu . && docker run --shm-size 2g -it pedigree:cpu pedigree run demo
# CUDA comes with the lock's wheels; the host gives the driver, through the NVIDIA container toolkit. Kernels that are compiled
# at run time use the lock's nvcc.
# The devcontainer is the first stage, in which `make setup` installs the CPU lock.
ARG DEVICE=gpu

FROM python:3.11-slim-bookworm AS system

RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap g++ git make tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 pedigree

# Apart, so that another change of the Makefile installs nothing again.
FROM system AS index
COPY Makefile /
RUN sed -n 's/^TORCH_CPU_INDEX ?= //p' /Makefile > /torch-cpu

FROM system AS cpu

FROM system AS gpu
ENV CUDA_HOME=/venv/lib/python3.11/site-packages/nvidia/cu13 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM $DEVICE
ARG DEVICE

COPY requirements/cpu.txt requirements/gpu.txt requirements/dev.txt requirements/cuda_links.py /tmp/requirements/
COPY --from=index /torch-cpu /tmp/requirements/
RUN cd /tmp/requirements \
    && install="/venv/bin/pip install --no-cache-dir --no-deps" \
    && python -m venv /venv \
    && $install "$(grep ^setuptools== $DEVICE.txt)" \
    && if [ $DEVICE = cpu ]; then $install --extra-index-url "$(cat torch-cpu)" "$(grep ^torch== cpu.txt)+cpu"; fi \
    && $install --no-build-isolation -r $DEVICE.txt -r dev.txt \
    && /venv/bin/python cuda_links.py \
    && rm -rf /tmp/requirements

ENV PATH=/venv/bin:$PATH \
    PEDIGREE_CACHE=/var/cache/pedigree \
    DO_NOT_TRACK=1 \
    DVC_NO_ANALYTICS=1 \
    GX_ANALYTICS_ENABLED=false \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    VLLM_NO_USAGE_STATS=1

# The code is installed where it lies: with a clone mounted over /project, edits take effect and artifacts stay on the host.
# The packaged models and data are in the image: `pedigree run demo` needs no network. Project, home and cache are open to every
# user id: `docker run --user` and pods have others than this image knows.
WORKDIR /project
COPY --chown=pedigree . .
RUN /venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
    && PIP_NO_CACHE_DIR=1 /venv/bin/python -m pedigree.data.artifacts.assets \
    && mkdir /var/lib/pedigree \
    && chmod 1777 /var/lib/pedigree /var/cache/pedigree \
    && chmod -R a+rwX /project \
    && git config --system --add safe.directory /project

# A process of its own at the head reaps what jobs leave behind, and passes signals on.
USER pedigree
ENV HOME=/var/lib/pedigree USER=pedigree
ENTRYPOINT ["tini", "--"]
CMD ["pedigree", "--help"]
