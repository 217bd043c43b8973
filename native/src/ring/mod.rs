//! `Ring`: transfers between files and buffers through io_uring, by a thread of its own.

mod kernel;
mod requests;
mod start;
mod worker;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBlockingIOError, PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use self::requests::{Command, Completion, Operation, Request, Shared};
use self::start::{event, failure, refused, start};
use self::worker::Limits;
use crate::buffers::{Span, numbers, writable};

/// Columns of a row of `submit`.
const COLUMNS: usize = 8;
/// The kernel moves no more in one call: 2 GiB less a page.
const LONGEST: u64 = 0x7FFF_F000;

/// What belongs to the threads of Python.
struct Inner {
    arena: Span,
    headers: Span,
    files: Vec<bool>,
    closed: bool,
    /// Exported until no transfer can touch them any more.
    held: Vec<PyUntypedBuffer>,
}

/// Transfers through io_uring between files and two buffers, `arena` and (optional) `headers`.
///
/// `depth`: transfers that the kernel has at a time; `in_flight_bytes`: bytes of these (a larger
/// transfer goes alone); `files`: files at a time; `queue`: rows that are accepted and not collected.
/// Reads go before writes, of which one goes after at most sixteen reads that passed it. Raises
/// OSError where io_uring cannot be had: ENOSYS (no such kernel), EPERM or EACCES (forbidden),
/// ENOMEM (RLIMIT_MEMLOCK, against which the ring's queues count); ValueError for other arguments.
///
/// The methods may be called from any thread. Memory of a transfer must stay untouched from
/// `submit` until its completion was collected, whatever else happens.
#[pyclass(frozen, module = "kvtier_native")]
pub struct Ring {
    shared: Arc<Shared>,
    inner: Mutex<Inner>,
    queue: usize,
    deferred: bool,
    files_registered: bool,
}

#[pymethods]
impl Ring {
    #[new]
    #[pyo3(signature = (arena, headers=None, *, depth=128, in_flight_bytes=256 << 20, files=4096, queue=65536))]
    fn new(
        py: Python<'_>,
        arena: &Bound<'_, PyAny>,
        headers: Option<&Bound<'_, PyAny>>,
        depth: usize,
        in_flight_bytes: u64,
        files: u32,
        queue: usize,
    ) -> PyResult<Self> {
        let bounds = [
            ("depth", depth as u64, 1, 4096),
            ("in_flight_bytes", in_flight_bytes, 1, u64::MAX),
            ("files", u64::from(files), 1, 1 << 16),
            ("queue", queue as u64, 1, 1 << 24),
        ];
        for (name, value, least, most) in bounds {
            if !(least..=most).contains(&value) {
                return Err(PyValueError::new_err(format!(
                    "{name}={value}: write a number from {least} to {most}"
                )));
            }
        }
        let arena = PyUntypedBuffer::get(arena)?;
        let memory = writable(&arena, "arena")?;
        let mut held = vec![arena];
        let mut beside = Span { start: std::ptr::null_mut(), length: 0 };
        if let Some(headers) = headers {
            let headers = PyUntypedBuffer::get(headers)?;
            beside = writable(&headers, "headers")?;
            held.push(headers);
        }
        for span in [memory, beside] {
            span.start.expose_provenance();
        }
        let shared = Arc::new(Shared::new(event()?, event()?));
        let limits = Limits { depth, bytes: in_flight_bytes };
        let started = start(Arc::clone(&shared), limits, files)?;
        let answer = py.detach(move || started.recv());
        let (deferred, files_registered) = match answer {
            Ok(Ok(features)) => features,
            Ok(Err(error)) => return Err(refused(error)),
            Err(_) => return Err(failure(libc::EIO, "the ring's thread ended")),
        };
        let inner = Inner {
            arena: memory,
            headers: beside,
            files: vec![false; files as usize],
            closed: false,
            held,
        };
        Ok(Ring { shared, inner: Mutex::new(inner), queue, deferred, files_registered })
    }

    /// Take a file in; the number by which rows name it. The descriptor may be closed afterwards:
    /// the ring has its own. Raises OSError: EBADF, or EMFILE when the table is full.
    fn add_file(&self, descriptor: RawFd) -> PyResult<u32> {
        let mut inner = self.inner()?;
        let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        let file = unsafe { OwnedFd::from_raw_fd(copy) };
        let free = inner.files.iter().position(|taken| !taken);
        let Some(index) = free else {
            let full = format!("the ring has {} files, drop one first", inner.files.len());
            return Err(failure(libc::EMFILE, &full));
        };
        inner.files[index] = true;
        let index = index as u32;
        self.shared.send(Command::AddFile { index, file });
        Ok(index)
    }

    /// Let a file go. What is queued for it completes with -ECANCELED, what is in flight goes on.
    /// Raises IndexError when there is none of that number.
    fn drop_file(&self, py: Python<'_>, index: u32) -> PyResult<()> {
        let mut inner = self.inner()?;
        match inner.files.get_mut(index as usize) {
            Some(taken) if *taken => *taken = false,
            _ => return Err(PyIndexError::new_err(format!("the ring has no file {index}"))),
        }
        let (answer, reply) = sync_channel(1);
        // Sent before another thread can get the number again.
        self.shared.send(Command::DropFile { index, answer });
        drop(inner);
        let _ = py.detach(move || reply.recv());
        Ok(())
    }

    /// Register a part of the arena, in pieces of 1 GiB: transfers inside a piece save the look-up
    /// of their pages. It puts memory behind all of it, and other transfers wait meanwhile. 0, or the errno that says why not (ENOMEM:
    /// RLIMIT_MEMLOCK; ENOSYS: old kernel); transfers work all the same. A part whose memory is
    /// given back (a hole punched) must be unpinned before.
    fn pin(&self, py: Python<'_>, offset: u64, length: usize) -> PyResult<i32> {
        self.pinning(py, offset, length, |start, length, answer| Command::Pin {
            start,
            length,
            answer,
        })
    }

    /// Undo `pin` for every piece that touches this part of the arena. Returns when that is done.
    fn unpin(&self, py: Python<'_>, offset: u64, length: usize) -> PyResult<()> {
        let unpin = |start, length, answer| Command::Unpin { start, length, answer };
        self.pinning(py, offset, length, unpin).map(drop)
    }

    /// Queue transfers. `rows`: uint64, 8 columns in one contiguous array:
    ///
    /// operation (0 read, 1 write, 2 flush: fdatasync), file (of `add_file`), offset in the file,
    /// offset in the arena, bytes of it, offset in `headers`, bytes of those, tag. The header goes
    /// in front of the payload in the file, in one transfer; either may have 0 bytes.
    ///
    /// A tag comes back with the completion; it should be unique. `together`: the event descriptor is
    /// raised once, when the last of them has completed. All rows are taken, or none:
    /// raises IndexError for memory or a file that is not there, ValueError for a row that makes no
    /// sense or a closed ring, BlockingIOError when `queue` is full.
    #[pyo3(signature = (rows, together=false))]
    fn submit(&self, rows: &Bound<'_, PyAny>, together: bool) -> PyResult<()> {
        let words = numbers(rows, "rows")?;
        if words.len() % COLUMNS != 0 {
            return Err(PyValueError::new_err(format!(
                "{} numbers are no rows of {COLUMNS}",
                words.len()
            )));
        }
        let inner = self.inner()?;
        let mut requests: Vec<Request> =
            words.chunks_exact(COLUMNS).map(|row| inner.request(row)).collect::<PyResult<_>>()?;
        let n = requests.len();
        let taken = self.shared.open.fetch_add(n, Ordering::AcqRel);
        if taken + n > self.queue {
            self.shared.open.fetch_sub(n, Ordering::AcqRel);
            return Err(PyBlockingIOError::new_err((
                libc::EAGAIN,
                format!("{taken} transfers are open and {n} more than {} do not fit", self.queue),
            )));
        }
        if together && n > 0 {
            let group = self.shared.group(n);
            requests.iter_mut().for_each(|request| request.group = group);
        }
        self.shared.send(Command::Submit(requests));
        Ok(())
    }

    /// What has completed since the last call, as bytes: pairs of uint64 tag and int64 result, which
    /// is the bytes moved (fewer than asked for at the end of a file) or -errno.
    fn collect<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let completions = self.shared.collect();
        PyBytes::new_with(py, completions.len() * 16, |out| {
            for (pair, Completion { tag, result, .. }) in out.chunks_exact_mut(16).zip(&completions)
            {
                pair[..8].copy_from_slice(&tag.to_ne_bytes());
                pair[8..].copy_from_slice(&result.to_ne_bytes());
            }
            Ok(())
        })
    }

    /// Ask for the end of transfers by their tags (uint64). What has not been started completes with
    /// -ECANCELED; the kernel may or may not stop what it has. Each completes all the same, and its
    /// memory stays taken until then.
    fn cancel(&self, tags: &Bound<'_, PyAny>) -> PyResult<()> {
        let tags = numbers(tags, "tags")?;
        drop(self.inner()?);
        self.shared.send(Command::Cancel(tags));
        Ok(())
    }

    /// The event descriptor that is readable while there are completions to collect.
    fn fileno(&self) -> RawFd {
        self.shared.ready.as_raw_fd()
    }

    /// Cancel everything and wait for what the kernel has, at most `timeout_seconds`. The number of
    /// transfers that are still in flight: with 0 the buffers are free. Otherwise they stay
    /// exported; call it again. `collect` works on.
    fn close(&self, py: Python<'_>, timeout_seconds: f64) -> PyResult<usize> {
        let patience = Duration::try_from_secs_f64(timeout_seconds.clamp(0.0, 1e6))
            .map_err(|_| PyValueError::new_err("timeout_seconds must be a number"))?;
        let mut inner = self.book();
        if !inner.closed {
            inner.closed = true;
            self.shared.send(Command::Close);
        }
        drop(inner);
        let standing = py.detach(|| self.shared.wait(patience));
        if standing.finished {
            // Given back without the lock: that may run Python.
            let held = std::mem::take(&mut self.book().held);
            drop(held);
        }
        Ok(standing.in_flight)
    }

    /// Transfers that the kernel has.
    #[getter]
    fn in_flight(&self) -> usize {
        self.shared.standing().in_flight
    }

    /// Are files registered with the kernel? (5.19 or newer)
    #[getter]
    fn files_registered(&self) -> bool {
        self.files_registered
    }

    /// The errno with which the kernel gave the ring up, 0 while it works. What is asked of a broken
    /// ring completes with that errno; what was in flight may never complete.
    #[getter]
    fn broken(&self) -> i32 {
        self.shared.standing().broken
    }

    /// Are completions worked off by the waiting thread alone? (6.1 or newer)
    #[getter]
    fn deferred(&self) -> bool {
        self.deferred
    }
}

type Answer = std::sync::mpsc::SyncSender<Result<(), i32>>;

impl Ring {
    fn book(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inner(&self) -> PyResult<MutexGuard<'_, Inner>> {
        let inner = self.book();
        if inner.closed { Err(PyValueError::new_err("the ring is closed")) } else { Ok(inner) }
    }

    fn pinning(
        &self,
        py: Python<'_>,
        offset: u64,
        length: usize,
        command: impl FnOnce(usize, usize, Answer) -> Command,
    ) -> PyResult<i32> {
        let arena = self.inner()?.arena;
        arena.check(&[offset], length, "arena")?;
        let (answer, reply) = sync_channel(1);
        self.shared.send(command(arena.start.addr() + offset as usize, length, answer));
        Ok(match py.detach(move || reply.recv()) {
            Ok(Ok(())) => 0,
            Ok(Err(errno)) => errno,
            Err(_) => libc::ECANCELED,
        })
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !inner.closed {
            self.shared.send(Command::Close);
        }
        if !self.shared.standing().finished {
            // The kernel may still write there: better a mapping that stays than memory of others.
            for buffer in inner.held.drain(..) {
                std::mem::forget(buffer);
            }
        }
    }
}

impl Inner {
    fn request(&self, row: &[u64]) -> PyResult<Request> {
        let [operation, file, file_offset, offset, length, header_offset, header_length, tag] =
            row.try_into().expect("rows of eight");
        let operation = match operation {
            0 => Operation::Read,
            1 => Operation::Write,
            2 => Operation::Flush,
            _ => return Err(PyValueError::new_err(format!("{operation} is no operation"))),
        };
        if !self.files.get(file as usize).is_some_and(|taken| *taken) {
            return Err(PyIndexError::new_err(format!("the ring has no file {file}")));
        }
        let bytes = length.saturating_add(header_length);
        let end = file_offset.checked_add(bytes).filter(|&end| end <= i64::MAX as u64);
        let moves = operation != Operation::Flush;
        if end.is_none() || bytes > LONGEST || moves != (bytes > 0) {
            return Err(PyValueError::new_err(format!(
                "{operation:?} of {bytes} bytes at {file_offset} of a file makes no sense"
            )));
        }
        self.arena.check(&[offset], length as usize, "arena")?;
        self.headers.check(&[header_offset], header_length as usize, "headers")?;
        Ok(Request {
            operation,
            file: file as u32,
            file_offset,
            header: self.headers.start.addr() + header_offset as usize,
            header_length: header_length as u32,
            payload: self.arena.start.addr() + offset as usize,
            payload_length: length as u32,
            tag,
            group: 0,
        })
    }
}
