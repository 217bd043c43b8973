"""Builds the two images of this project and runs them for real.

* :mod:`image.engine` finds docker or podman, installs Debian's podman where there is neither, and
  knows the flags that this machine needs;
* :mod:`image.base` finds a base image: the one asked for, the Dockerfile's default where a registry
  can be reached, else a Debian made by debootstrap;
* :mod:`image.build` runs the Dockerfile, handing the machine's certificates and package settings in
  as secrets that leave no trace in an image;
* :mod:`image.check` runs both images as the chart does, against a real API server.

`make image` and `make image-test` call it. Standard library and `controlplane` only.
"""
