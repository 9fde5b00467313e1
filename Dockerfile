# docker build -t fl-lightning . && docker run --gpus all -v "$PWD:/work" fl-lightning fit --config quickstart
# A test makes the wheel of these files; the image itself has never been built.
FROM python:3.12-slim
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY fl_lightning fl_lightning
COPY configs configs
RUN pip install --no-cache-dir .
WORKDIR /work
ENTRYPOINT ["fl-lightning"]
