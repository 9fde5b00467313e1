# docker build -t fl-lightning . && docker run --gpus all -v "$PWD:/work" fl-lightning fit --config quickstart
# Built and run with buildah on a base of Debian 12 with Python 3.12; the workflow of GitHub builds it with docker.
FROM python:3.12-slim
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY fl_lightning fl_lightning
COPY configs configs
RUN pip install --no-cache-dir .
WORKDIR /work
ENTRYPOINT ["fl-lightning"]
