//! What travels between the threads of Python and the thread of a ring: plain values.

use std::collections::{HashMap, VecDeque};
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
    /// Of the call of `submit` whose completions are told together; 0 for none.
    pub group: u32,
}

impl Request {
    pub fn bytes(&self) -> u64 {
        u64::from(self.header_length) + u64::from(self.payload_length)
    }

    pub fn ended(&self, result: i64) -> Completion {
        Completion { tag: self.tag, result, group: self.group }
    }
}

/// How a request ended: bytes or -errno.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    pub tag: u64,
    pub result: i64,
    pub group: u32,
}

/// Completions that nobody has collected, and how many are still to come of each group.
#[derive(Default)]
struct Outbox {
    done: Vec<Completion>,
    groups: HashMap<u32, usize>,
    last_group: u32,
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
    outbox: Mutex<Outbox>,
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
            outbox: Mutex::default(),
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

    /// A new group of `n` requests: who waits is woken when the last of them has ended.
    pub fn group(&self, n: usize) -> u32 {
        let mut outbox = lock(&self.outbox);
        outbox.last_group = outbox.last_group.wrapping_add(1).max(1);
        let group = outbox.last_group;
        outbox.groups.insert(group, n);
        group
    }

    pub fn complete(&self, completions: &mut Vec<Completion>) {
        if completions.is_empty() {
            return;
        }
        let mut outbox = lock(&self.outbox);
        let mut tell = false;
        for completion in completions.iter() {
            tell |= match outbox.groups.get_mut(&completion.group) {
                Some(left) if *left > 1 => {
                    *left -= 1;
                    false
                }
                Some(_) => {
                    outbox.groups.remove(&completion.group);
                    true
                }
                None => true,
            };
        }
        outbox.done.append(completions);
        drop(outbox);
        if tell {
            raise(&self.ready);
        }
    }

    pub fn collect(&self) -> Vec<Completion> {
        settle(&self.ready);
        let completions = std::mem::take(&mut lock(&self.outbox).done);
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
