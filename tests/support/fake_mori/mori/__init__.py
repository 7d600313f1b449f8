"""A stand-in for the package `amd-mori` 1.2.4, for tests alone: its folder is put on the path of test processes.

It moves bytes between real processes of one host (`process_vm_writev`) and behaves, where it hurts, as the package was
measured to behave over a user-space verbs library. Reproduced:

- creating the RDMA backend: RuntimeError without a device, `exit(-1)` without a GPU and for an address that is not
  local or a port in use, an endless loop that keeps the interpreter lock (all by FAKE_MORI_* variables or arguments);
- no TCP backend: NotImplementedError, or SIGABRT with a configuration; XGMI exists and moves nothing on a CPU;
- a status is borrowed by address: one that was dropped unfinished lets the next transfer succeed falsely;
- a status starts as INIT, on which `WaitFor` returns at once; SUCCESS is 0; the first error of a status stays;
- `batch_write` with lists of different lengths: SIGABRT; `batch_write` of a session: ERR_INVALID_ARGS;
- first contact blocks: control port refused raises at once, a silent peer raises after MORI_IO_CP_TIMEOUT_MS (5 s), and
  `create_session` keeps the interpreter lock meanwhile; an unknown memory raises ("got=0");
- after one failed transfer a pair of engines fails for ever, also with registrations made anew and with the peer
  restarted under its key; a new key or a new backend works;
- a dead peer: "transport retry counter exceeded" after FAKE_MORI_RETRY_MS, `alive()` False, one peer failure; a region
  that the peer deregistered: "remote access error" with `alive()` True and no peer failure; nothing is seen while idle;
- no cancel: forgetting a remote engine stops nothing, and removing the backend leaves statuses in progress for ever;
- notifications: `pop_inbound_transfer_status` does not pop, a uid used twice is never reported again;
- descriptors of another version do not unpack: std::bad_cast (FAKE_MORI_LAYOUT=1.0.0 makes such).

Stricter than measured: an engine destroyed with an unfinished transfer aborts the process at once (the package hangs or
writes into freed memory). Not reproduced: reads, GPU memory, several queue pairs, full send queues, the spinning core.

FAKE_MORI_DELAY_MS delays each call in the "device", FAKE_MORI_DELAY_AFTER lets that many calls through undelayed first.
"""

__version__ = "1.2.4"
