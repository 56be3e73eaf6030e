"""Training on a CUDA device that is not there: what a machine without a GPU can tell. `make test-device` runs it.

`stand_in/` holds a library in C that is loaded before the libraries of torch's own CUDA build. It has the functions of
the CUDA runtime, the driver, cuBLAS and NCCL that a training step calls; one that it lacks ends the process with its
name.

- Memory of a device is the host's, and ends after 80 GiB. Copies are copies. **Kernels do nothing**: what they would
  write is zeros, so no number here says anything about a loss.
- Streams, events and waits have their order: what waits for another stream or rank runs once that has come. With
  CUDA_DEVICE_MAX_CONNECTIONS streams share queues, as on a GPU.
- NCCL's collectives and messages really happen, between processes. Nothing is buffered: a send ends when it is
  received, so that what hangs for some size of message on some network hangs here. Operations of a communicator run one
  at a time; two that do not match end the process, and a step that hangs does after STAND_IN_PATIENCE_S, each rank with
  what it waits for.
- Memory that the allocator gives out again while a copy or an operation of NCCL may still use it, however soon that has
  ended this time, ends the process. What kernels read and write is not known.
- Everything above is torch's own: dispatch and argument checks, the caching allocator, autograd's threads,
  ProcessGroupNCCL with its watchdog, torch.compile with Triton and ptxas for the device's capability.

Not to be had here: a time, a number, a kernel's own mistake or its need of shared memory (but Triton's, which it checks
as it compiles); cuDNN, CUDA graphs, expandable segments, symmetric memory, kernels that size a tensor by its values,
such as experts; NCCL's own choice of algorithms, its buffers and its use of a GPU's multiprocessors.
"""
