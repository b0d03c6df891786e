# Three images, one file: --target cpu | cuda | ascend. Dependencies by lock first, our sources last, so that a change of
# ours moves one layer of a few megabytes. docs/deploy.md says how to run them, and what was run and what was not.
# hadolint global ignore=DL3008,DL3025
# (Debian's mirrors keep one version of a package, so none can be pinned; HEALTHCHECK needs a shell for its variables.)
ARG CPU_BASE=debian:bookworm-slim
ARG CUDA_BASE=debian:bookworm-slim
# The start accepts vllm-ascend 0.23.0.post1 only, hence this tag. Atlas A3: the same with -a3, and SOC=ascend910_93.
ARG ASCEND_BASE=quay.io/ascend/vllm-ascend:v0.23.0.post1

# --- Python, and what vLLM's CPU extension links to; also what the cpu image stands on
FROM ${CPU_BASE} AS python-cpu
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates libnuma1 \
 && rm -rf /var/lib/apt/lists/*

# Triton compiles its launchers when it first runs: a C compiler and Python's headers stay in the image.
FROM ${CUDA_BASE} AS python-cuda
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv python3-dev ca-certificates libnuma1 gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

# --- Tools of the build; nothing of them gets into an image. PIP_INDEX_URL, UV_DEFAULT_INDEX: your mirror, if you have one.
FROM python-cpu AS tools
ARG PIP_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/tools && /opt/tools/bin/pip install -q --no-cache-dir uv==0.13.9 setuptools==80.9.0 wheel==0.45.1

# --- Our wheel, with the C++ kernels compiled for every instruction set of this architecture
FROM tools AS wheel
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY config config
COPY ops ops
COPY server server
RUN python3 -c "from ops.kernels.cpu.build import prebuild; print(*prebuild(), sep='\n')" \
 && /opt/tools/bin/pip wheel -q --no-deps --no-build-isolation --no-cache-dir -w /dist .

# --- Locked dependencies, compiled to bytecode: a read-only image can't do it later
FROM tools AS packages-cpu
ARG UV_DEFAULT_INDEX
COPY docker/locks/cpu.lock /build/
RUN python3 -m venv /opt/samebits \
 && /opt/tools/bin/uv pip install -q --no-cache --compile-bytecode --python /opt/samebits/bin/python --no-deps -r /build/cpu.lock

FROM python-cuda AS packages-cuda
ARG UV_DEFAULT_INDEX
COPY --from=tools /opt/tools/bin/uv /usr/local/bin/uv
COPY docker/locks/cuda.lock /build/
RUN python3 -m venv /opt/samebits \
 && uv pip install -q --no-cache --compile-bytecode --python /opt/samebits/bin/python --no-deps -r /build/cuda.lock

# --- cpu
FROM python-cpu AS cpu
ARG UID=1000
RUN useradd --uid ${UID} --gid 0 --no-create-home --home-dir /var/lib/samebits samebits \
 && install -d -o ${UID} -g 0 -m 2770 /var/lib/samebits
COPY --from=packages-cpu /opt/samebits /opt/samebits
# Group 0 and USER: an arbitrary user id (as OpenShift gives one) works too. Everything that is written is in one volume.
ENV PATH=/opt/samebits/bin:/usr/local/bin:/usr/bin:/bin USER=samebits HOME=/var/lib/samebits \
    SAMEBITS_CACHE_DIR=/var/lib/samebits XDG_CACHE_HOME=/var/lib/samebits/cache HF_HOME=/var/lib/samebits/huggingface \
    SAMEBITS_DEVICE=cpu SAMEBITS_HOST=0.0.0.0 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY docker/healthy.py /usr/local/bin/healthy
COPY --from=wheel /dist /tmp/dist
RUN /opt/samebits/bin/pip install -q --no-deps --no-index --no-cache-dir /tmp/dist/*.whl && rm -r /tmp/dist
USER ${UID}
WORKDIR /var/lib/samebits
VOLUME /var/lib/samebits
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=2 CMD python -IS /usr/local/bin/healthy "${SAMEBITS_PORT:-8000}" "${SAMEBITS_SSL_CERTFILE}"
STOPSIGNAL SIGTERM
ENTRYPOINT ["samebits", "serve"]

# --- cuda: driver and libcuda come from the host, through NVIDIA's container runtime
FROM python-cuda AS cuda
ARG UID=1000
RUN useradd --uid ${UID} --gid 0 --no-create-home --home-dir /var/lib/samebits samebits \
 && install -d -o ${UID} -g 0 -m 2770 /var/lib/samebits
COPY --from=packages-cuda /opt/samebits /opt/samebits
# The device is named: without a GPU the start fails, it does not move to the CPU in silence.
ENV PATH=/opt/samebits/bin:/usr/local/bin:/usr/bin:/bin USER=samebits HOME=/var/lib/samebits \
    SAMEBITS_CACHE_DIR=/var/lib/samebits XDG_CACHE_HOME=/var/lib/samebits/cache HF_HOME=/var/lib/samebits/huggingface \
    SAMEBITS_DEVICE=cuda SAMEBITS_HOST=0.0.0.0 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY docker/healthy.py /usr/local/bin/healthy
COPY --from=wheel /dist /tmp/dist
RUN /opt/samebits/bin/pip install -q --no-deps --no-index --no-cache-dir /tmp/dist/*.whl && rm -r /tmp/dist
USER ${UID}
WORKDIR /var/lib/samebits
VOLUME /var/lib/samebits
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=2 CMD python -IS /usr/local/bin/healthy "${SAMEBITS_PORT:-8000}" "${SAMEBITS_SSL_CERTFILE}"
STOPSIGNAL SIGTERM
ENTRYPOINT ["samebits", "serve"]

# --- ascend: torch, torch-npu, CANN, vLLM and vllm-ascend are the base image's; we add a few small packages and ourselves
FROM ${ASCEND_BASE} AS ascend
ARG SOC=ascend910b
ARG PIP_INDEX_URL
ARG UID=1000
USER 0
COPY docker/ascend_library.sh /tmp/
# Fails the build if the AscendC batch-invariant library is not there afterwards; upstream's own build logs that and goes on.
RUN bash /tmp/ascend_library.sh ${SOC} && rm /tmp/ascend_library.sh
COPY docker/locks/ascend.lock /tmp/
RUN python3 -m pip install -q --no-cache-dir --no-deps -r /tmp/ascend.lock && rm /tmp/ascend.lock
# The driver admits the user HwHiAiUser of the host, whose id is 1000 as a rule: run with that id.
RUN (getent passwd ${UID} > /dev/null || useradd --uid ${UID} --no-create-home --home-dir /var/lib/samebits samebits) \
 && install -d -o ${UID} -g 0 -m 2770 /var/lib/samebits
ENV USER=samebits HOME=/var/lib/samebits SAMEBITS_CACHE_DIR=/var/lib/samebits XDG_CACHE_HOME=/var/lib/samebits/cache \
    HF_HOME=/var/lib/samebits/huggingface SAMEBITS_DEVICE=npu SAMEBITS_HOST=0.0.0.0 PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
COPY docker/healthy.py /usr/local/bin/healthy
COPY docker/on_ascend.sh /usr/local/bin/on-ascend
COPY --from=wheel /dist /tmp/dist
RUN python3 -m pip install -q --no-deps --no-index --no-cache-dir /tmp/dist/*.whl && rm -r /tmp/dist \
 && chmod 0755 /usr/local/bin/on-ascend
USER ${UID}
WORKDIR /var/lib/samebits
VOLUME /var/lib/samebits
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s --retries=2 CMD python3 -IS /usr/local/bin/healthy "${SAMEBITS_PORT:-8000}" "${SAMEBITS_SSL_CERTFILE}"
STOPSIGNAL SIGTERM
# on-ascend loads CANN's variables, looks for cards and driver, and then is replaced by samebits: signals reach it.
ENTRYPOINT ["on-ascend", "samebits", "serve"]
