# dsrun for checks, plans and diagnoses: no torch, no DeepSpeed, no GPU.
#
#   docker build -f .github/docker/checks.Dockerfile -t dsrun-checks .
#   docker run --rm -v "$PWD:/work" dsrun-checks validate configs/ --strict
FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir /src && rm -rf /src
RUN useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["dsrun"]
CMD ["--help"]
