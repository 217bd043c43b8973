//! The start of a ring's thread, and what is said when there can be none.

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use super::kernel::Kernel;
use super::requests::Shared;
use super::worker::{Limits, Worker};

/// Features of the ring (see the getters of `Ring`), once it is there.
pub type Started = Receiver<std::io::Result<(bool, bool)>>;

/// The thread, which makes the ring: only it may use it.
pub fn start(shared: Arc<Shared>, limits: Limits, files: u32) -> PyResult<Started> {
    let (tell, started) = sync_channel(1);
    let body = move || {
        block_signals();
        // A transfer has up to two entries; room for the poll and for cancellations beside them.
        match Kernel::new((2 * limits.depth as u32 + 2).next_power_of_two(), files) {
            Ok(kernel) => {
                let _ = tell.send(Ok((kernel.deferred, kernel.files_registered())));
                Worker::new(kernel, shared, limits).run();
            }
            Err(error) => {
                let _ = tell.send(Err(error));
            }
        }
    };
    std::thread::Builder::new().name("kvtier-ring".into()).spawn(body)?;
    Ok(started)
}

/// Signals are for the threads of Python.
fn block_signals() {
    unsafe {
        let mut all = std::mem::MaybeUninit::<libc::sigset_t>::zeroed().assume_init();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
    }
}

pub fn event() -> PyResult<OwnedFd> {
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub fn refused(error: std::io::Error) -> PyErr {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    let why = match errno {
        libc::ENOSYS => "this kernel has no io_uring",
        libc::EPERM | libc::EACCES => {
            "io_uring is forbidden here (seccomp profile, or kernel.io_uring_disabled)"
        }
        libc::ENOMEM => "no memory for an io_uring; raise RLIMIT_MEMLOCK",
        _ => "io_uring cannot be set up",
    };
    failure(errno, why)
}

pub fn failure(errno: i32, why: &str) -> PyErr {
    PyOSError::new_err((errno, why.to_owned()))
}
