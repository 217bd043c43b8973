//! A mapped file that somebody else cuts short must not kill this process.
//!
//! Access to a mapped page behind the end of its file raises SIGBUS. The handler here does what
//! libwayland does for pools of shared memory that its clients may truncate: where the address is
//! in a guarded mapping, a page of zeros takes the place of the lost one and the access goes on.
//! The bytes are wrong, which the checksum of the page finds. Every other SIGBUS (an address
//! elsewhere, memory that the hardware reports as broken) goes to whoever handled it before.
//!
//! The replaced page belongs to this process alone from then on, whatever becomes of the file: a
//! mapping with faults is to be given up by its owner.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyOSError, PyRuntimeError};
use pyo3::prelude::*;

use crate::buffers::writable;

/// Guarded ranges at a time; a process has one per arena.
const RANGES: usize = 256;

/// What the handler reads. `end` is 0 while the entry is free; `start` is written first.
struct Range {
    start: AtomicUsize,
    end: AtomicUsize,
    faults: AtomicU64,
}

static RANGES_IN_FORCE: [Range; RANGES] = [const {
    Range { start: AtomicUsize::new(0), end: AtomicUsize::new(0), faults: AtomicU64::new(0) }
}; RANGES];

static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);
/// The disposition before ours; never freed, so that the handler may read it at any time.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());
/// Serialises those who take and give back entries; the handler never locks.
static BOOK: Mutex<()> = Mutex::new(());

/// Replaces pages of a mapping that are gone, from the constructor on until `close`.
///
/// `Guard(buffer)`: a writable buffer over a mapped file. The buffer stays exported meanwhile, so
/// its `mmap` cannot be closed. Raises ValueError for another buffer, OSError when the handler
/// cannot be installed, RuntimeError when 256 mappings are guarded already.
#[pyclass(frozen, module = "kvtier_native")]
pub struct Guard {
    slot: usize,
    held: Mutex<Option<PyUntypedBuffer>>,
    final_faults: AtomicU64,
}

#[pymethods]
impl Guard {
    #[new]
    fn new(buffer: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(buffer)?;
        let span = writable(&buffer, "buffer")?;
        let _book = BOOK.lock().unwrap_or_else(PoisonError::into_inner);
        install()?;
        let slot = RANGES_IN_FORCE
            .iter()
            .position(|range| range.end.load(Ordering::Relaxed) == 0)
            .ok_or_else(|| PyRuntimeError::new_err(format!("{RANGES} mappings are guarded")))?;
        let range = &RANGES_IN_FORCE[slot];
        range.faults.store(0, Ordering::Relaxed);
        range.start.store(span.start.addr(), Ordering::Relaxed);
        range.end.store(span.start.addr() + span.length, Ordering::Release);
        Ok(Guard { slot, held: Mutex::new(Some(buffer)), final_faults: AtomicU64::new(0) })
    }

    /// Pages that were lost and replaced so far.
    #[getter]
    fn faults(&self) -> u64 {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match *held {
            Some(_) => RANGES_IN_FORCE[self.slot].faults.load(Ordering::Relaxed),
            None => self.final_faults.load(Ordering::Relaxed),
        }
    }

    /// Guard no longer; a second call does nothing.
    fn close(&self) {
        let book = BOOK.lock().unwrap_or_else(PoisonError::into_inner);
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let buffer = held.take();
        if buffer.is_some() {
            let range = &RANGES_IN_FORCE[self.slot];
            self.final_faults.store(range.faults.load(Ordering::Relaxed), Ordering::Relaxed);
            range.end.store(0, Ordering::Release);
        }
        // Giving a buffer back may run Python, which may let go of the interpreter's lock: whoever
        // gets it must not find these taken.
        drop(held);
        drop(book);
        drop(buffer);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.close();
    }
}

/// Takes SIGBUS over, once in the life of the process.
fn install() -> PyResult<()> {
    if !PREVIOUS.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    unsafe {
        let page = libc::sysconf(libc::_SC_PAGESIZE);
        PAGE_BYTES.store(usize::try_from(page).unwrap_or(4096), Ordering::Relaxed);
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
        if libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr()) != 0 {
            return Err(PyOSError::new_err(std::io::Error::last_os_error().to_string()));
        }
        // Known before the handler runs for the first time, and kept for ever.
        PREVIOUS.store(Box::into_raw(Box::new(previous.assume_init())), Ordering::Release);
        let mut ours = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        ours.sa_sigaction = on_bus_error as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut ours.sa_mask);
        if libc::sigaction(libc::SIGBUS, &ours, ptr::null_mut()) != 0 {
            let error = std::io::Error::last_os_error();
            drop(Box::from_raw(PREVIOUS.swap(ptr::null_mut(), Ordering::AcqRel)));
            return Err(PyOSError::new_err(error.to_string()));
        }
    }
    Ok(())
}

/// Only what is safe in a signal handler: atomics, and system calls that touch no memory of ours.
extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    unsafe {
        let errno = *libc::__errno_location();
        let code = (*info).si_code;
        if code == libc::BUS_ADRERR && replace((*info).si_addr().addr()) {
            *libc::__errno_location() = errno;
            return;
        }
        pass_on(signal, info, context);
        *libc::__errno_location() = errno;
    }
}

/// A page of zeros at the address, if it is guarded and there is one to be had.
unsafe fn replace(address: usize) -> bool {
    let Some(range) = RANGES_IN_FORCE.iter().find(|range| {
        let end = range.end.load(Ordering::Acquire);
        address < end && address >= range.start.load(Ordering::Relaxed)
    }) else {
        return false;
    };
    let page_bytes = PAGE_BYTES.load(Ordering::Relaxed);
    let page = ptr::without_provenance_mut::<c_void>(address & !(page_bytes - 1));
    let mapped = unsafe {
        libc::mmap(
            page,
            page_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        return false;
    }
    range.faults.fetch_add(1, Ordering::Relaxed);
    true
}

/// What would have happened without us.
unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    unsafe {
        let previous = PREVIOUS.load(Ordering::Acquire);
        let action = (*previous).sa_sigaction;
        let sent = (*info).si_code <= 0;
        if action == libc::SIG_IGN && sent {
            // Somebody sent it, and nobody cared.
        } else if action == libc::SIG_IGN || action == libc::SIG_DFL {
            // The access is repeated when the handler returns, and then kills; a signal that was
            // sent is not, so it is sent again.
            libc::sigaction(signal, previous, ptr::null_mut());
            if sent {
                libc::raise(signal);
            }
        } else if (*previous).sa_flags & libc::SA_SIGINFO != 0 {
            type WithInfo = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
            std::mem::transmute::<usize, WithInfo>(action)(signal, info, context);
        } else {
            std::mem::transmute::<usize, extern "C" fn(c_int)>(action)(signal);
        }
    }
}
