//! What travels between the threads of Python and the thread of a ring: plain values.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
    Flush,
}

/// One transfer, checked: its memory lies inside buffers that outlive it.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub operation: Operation,
    pub file: u32,
    pub file_offset: u64,
    /// Goes in front of the payload in the file; 0 bytes for none.
    pub header: usize,
    pub header_length: u32,
    pub payload: usize,
    pub payload_length: u32,
    pub tag: u64,
}

impl Request {
    pub fn bytes(&self) -> u64 {
        u64::from(self.header_length) + u64::from(self.payload_length)
    }
}

/// What a thread of Python asks the ring's thread to do, in the order in which it was asked.
pub enum Command {
    Submit(Vec<Request>),
    Cancel(Vec<u64>),
    AddFile { index: u32, file: OwnedFd },
    DropFile { index: u32, answer: SyncSender<()> },
    Pin { start: usize, length: usize, answer: SyncSender<Result<(), i32>> },
    Unpin { start: usize, length: usize, answer: SyncSender<Result<(), i32>> },
    Close,
}

/// Where a ring stands.
#[derive(Clone, Copy, Default)]
pub struct Standing {
    /// Transfers that the kernel has.
    pub in_flight: usize,
    /// The thread has ended: no transfer will touch memory any more.
    pub finished: bool,
    /// The ring broke with this errno: nothing is started, what is in flight stays so.
    pub broken: i32,
}

/// What both sides see.
pub struct Shared {
    commands: Mutex<VecDeque<Command>>,
    completions: Mutex<Vec<(u64, i64)>>,
    standing: Mutex<Standing>,
    changed: Condvar,
    /// Accepted and not collected yet.
    pub open: AtomicUsize,
    /// Readable while the ring's thread has commands to read.
    pub wake: OwnedFd,
    /// Readable while there are completions to collect.
    pub ready: OwnedFd,
}

/// A thread that panicked leaves plain values behind, never half of one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub fn new(wake: OwnedFd, ready: OwnedFd) -> Self {
        Self {
            commands: Mutex::default(),
            completions: Mutex::default(),
            standing: Mutex::default(),
            changed: Condvar::new(),
            open: AtomicUsize::new(0),
            wake,
            ready,
        }
    }

    pub fn send(&self, command: Command) {
        lock(&self.commands).push_back(command);
        raise(&self.wake);
    }

    pub fn receive(&self) -> VecDeque<Command> {
        settle(&self.wake);
        std::mem::take(&mut *lock(&self.commands))
    }

    /// Results are bytes or -errno.
    pub fn complete(&self, completions: &mut Vec<(u64, i64)>) {
        if !completions.is_empty() {
            lock(&self.completions).append(completions);
            raise(&self.ready);
        }
    }

    pub fn collect(&self) -> Vec<(u64, i64)> {
        settle(&self.ready);
        let completions = std::mem::take(&mut *lock(&self.completions));
        self.open.fetch_sub(completions.len(), Ordering::AcqRel);
        completions
    }

    pub fn standing(&self) -> Standing {
        *lock(&self.standing)
    }

    pub fn stand(&self, standing: Standing) {
        *lock(&self.standing) = standing;
        self.changed.notify_all();
    }

    /// Where it stands when the thread has ended or broke, or at the latest after `patience`.
    pub fn wait(&self, patience: Duration) -> Standing {
        let over = |standing: &mut Standing| !standing.finished && standing.broken == 0;
        let held = lock(&self.standing);
        let (held, _) = self
            .changed
            .wait_timeout_while(held, patience, over)
            .unwrap_or_else(PoisonError::into_inner);
        *held
    }
}

fn raise(event: &OwnedFd) {
    let one = 1u64;
    // It can only fail when the count is at its limit: then it is readable, which is the point.
    unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// Not readable from here on, until the next `raise`.
fn settle(event: &OwnedFd) {
    let mut count = 0u64;
    unsafe { libc::read(event.as_raw_fd(), (&raw mut count).cast(), 8) };
}
