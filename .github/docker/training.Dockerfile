# dsrun with what training on NVIDIA GPUs needs, at the versions of requirements/, whose hashes pip compares.
#
#   docker build -f .github/docker/training.Dockerfile -t dsrun-training .
#   docker run --rm --gpus all --shm-size 8g --ulimit memlock=-1 -v /data:/data -v "$PWD:/work" dsrun-training finetune ...
#
# torch's wheels bring CUDA's libraries; DeepSpeed's own operators (offload, NVMe) are compiled at their first use, which
# takes a compiler, and nvcc for those that run on the GPU.
FROM python:3.12
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libaio-dev openssh-client pdsh numactl \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir --no-deps --require-hashes -r /src/requirements/train.txt -r /src/requirements/cuda.txt \
    && pip install --no-cache-dir --no-deps /src \
    && rm -rf /src
RUN useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["dsrun"]
CMD ["--help"]
