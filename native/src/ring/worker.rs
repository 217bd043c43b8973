//! The thread of a ring: it alone submits and reaps.
//!
//! It sleeps in one system call until something completes; a poll of the event descriptor `wake` is
//! always among what can complete, so that a command wakes it too. Reads go before writes, but at most
//! `READS_IN_A_ROW` pass a waiting write: reads cannot starve writes for ever.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{opcode, squeue, types};

use super::kernel::Kernel;
use super::requests::{Command, Completion, Operation, Request, Shared, Standing};

const READS_IN_A_ROW: u32 = 16;
const WAKE: u64 = u64::MAX;
const CANCELLED: u64 = u64::MAX - 1;

/// Bounds of what the kernel has at a time.
#[derive(Clone, Copy)]
pub struct Limits {
    pub depth: usize,
    /// Bytes; a larger transfer goes alone.
    pub bytes: u64,
}

struct Flight {
    request: Request,
    /// What its entry points to; the kernel alone reads it.
    _vector: Box<[libc::iovec; 2]>,
    /// Entries of it that the kernel still has.
    entries: u32,
    /// Bytes of those that it has done, or the first error.
    result: i64,
}

/// A place for a transfer in flight. Its generation tells an answer that is meant for the transfer
/// before from one for this one.
struct Berth {
    generation: u32,
    flight: Option<Flight>,
}

pub struct Worker {
    kernel: Kernel,
    shared: Arc<Shared>,
    limits: Limits,
    reads: VecDeque<Request>,
    writes: VecDeque<Request>,
    berths: Vec<Berth>,
    free: Vec<usize>,
    bytes_in_flight: u64,
    /// Reads that were started while a write waited, since the last write.
    passed: u32,
    completed: Vec<Completion>,
    wake_armed: bool,
    closing: bool,
}

impl Worker {
    pub fn new(kernel: Kernel, shared: Arc<Shared>, limits: Limits) -> Self {
        let berths = (0..limits.depth).map(|_| Berth { generation: 0, flight: None }).collect();
        Self {
            kernel,
            shared,
            limits,
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            berths,
            free: (0..limits.depth).rev().collect(),
            bytes_in_flight: 0,
            passed: 0,
            completed: Vec::new(),
            wake_armed: false,
            closing: false,
        }
    }

    /// Until `Close` came and nothing is in flight, or the ring broke.
    pub fn run(mut self) {
        let broken = loop {
            if let Err(error) = self.turn() {
                break error.raw_os_error().unwrap_or(libc::EIO);
            }
            if self.closing && self.in_flight() == 0 {
                break 0;
            }
        };
        let in_flight = self.in_flight();
        let error = if broken == 0 { libc::ECANCELED } else { broken };
        for request in self.reads.drain(..).chain(self.writes.drain(..)) {
            self.completed.push(request.ended(-i64::from(error)));
        }
        self.shared.complete(&mut self.completed);
        if broken != 0 {
            // What is in flight may still arrive: ring and vectors stay, for ever.
            self.shared.stand(Standing { in_flight, finished: false, broken });
            self.refuse_from_now_on(broken);
        }
        let shared = Arc::clone(&self.shared);
        drop(self);
        shared.stand(Standing { in_flight: 0, finished: true, broken: 0 });
    }

    /// A broken ring answers every request with its errno until it is closed, and then stays.
    fn refuse_from_now_on(mut self: Worker, broken: i32) -> ! {
        loop {
            let mut events =
                libc::pollfd { fd: self.shared.wake.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            unsafe { libc::poll(&mut events, 1, -1) };
            for command in self.shared.receive() {
                match command {
                    Command::Submit(requests) => {
                        let refused = requests.iter().map(|r| r.ended(-i64::from(broken)));
                        self.completed.extend(refused);
                    }
                    Command::Pin { answer, .. } | Command::Unpin { answer, .. } => {
                        let _ = answer.send(Err(broken));
                    }
                    Command::DropFile { answer, .. } => {
                        let _ = answer.send(());
                    }
                    Command::Cancel(_) | Command::AddFile { .. } | Command::Close => {}
                }
            }
            self.shared.complete(&mut self.completed);
        }
    }

    fn in_flight(&self) -> usize {
        self.limits.depth - self.free.len()
    }

    fn turn(&mut self) -> io::Result<()> {
        for command in self.shared.receive() {
            self.obey(command)?;
        }
        if !self.closing {
            self.admit()?;
        }
        if !self.wake_armed {
            let wake = types::Fd(self.shared.wake.as_raw_fd());
            let readable = libc::POLLIN as u32;
            self.push(&opcode::PollAdd::new(wake, readable).build().user_data(WAKE))?;
            self.wake_armed = true;
        }
        self.note();
        self.shared.complete(&mut self.completed);
        if self.closing && self.in_flight() == 0 {
            return Ok(());
        }
        match self.kernel.ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if passing(&error) => {}
            Err(error) => return Err(error),
        }
        self.reap();
        self.note();
        self.shared.complete(&mut self.completed);
        Ok(())
    }

    fn note(&self) {
        self.shared.stand(Standing { in_flight: self.in_flight(), finished: false, broken: 0 });
    }

    fn obey(&mut self, command: Command) -> io::Result<()> {
        match command {
            Command::Submit(requests) => {
                for request in requests {
                    match request.operation {
                        Operation::Read => self.reads.push_back(request),
                        Operation::Write | Operation::Flush => self.writes.push_back(request),
                    }
                }
            }
            Command::Cancel(tags) => self.cancel(|request| tags.contains(&request.tag))?,
            Command::AddFile { index, file } => self.kernel.add_file(index, file),
            Command::DropFile { index, answer } => {
                self.cancel_queued(|request| request.file == index);
                self.kernel.drop_file(index);
                let _ = answer.send(());
            }
            Command::Pin { start, length, answer } => {
                let _ = answer.send(self.kernel.pin(start, length));
            }
            Command::Unpin { start, length, answer } => {
                self.kernel.unpin(start, length);
                let _ = answer.send(Ok(()));
            }
            Command::Close => {
                self.closing = true;
                self.cancel(|_| true)?;
            }
        }
        Ok(())
    }

    /// What waits is done with at once; what the kernel has is asked for, and its completion says
    /// what became of it.
    fn cancel(&mut self, which: impl Fn(&Request) -> bool) -> io::Result<()> {
        self.cancel_queued(&which);
        let mut asked = Vec::new();
        for (index, berth) in self.berths.iter().enumerate() {
            let Some(flight) = &berth.flight else { continue };
            if which(&flight.request) {
                let first = name(index, berth.generation);
                asked.push(first);
                if flight.entries > 1 {
                    asked.push(first | SECOND);
                }
            }
        }
        for transfer in asked {
            let entry = opcode::AsyncCancel::new(transfer).build();
            self.push(&entry.user_data(CANCELLED))?;
        }
        Ok(())
    }

    fn cancel_queued(&mut self, which: impl Fn(&Request) -> bool) {
        for queue in [&mut self.reads, &mut self.writes] {
            queue.retain(|request| {
                let cancelled = which(request);
                if cancelled {
                    self.completed.push(request.ended(-i64::from(libc::ECANCELED)));
                }
                !cancelled
            });
        }
    }

    /// Hand over what the limits allow.
    fn admit(&mut self) -> io::Result<()> {
        while let Some(&index) = self.free.last() {
            let write =
                !self.writes.is_empty() && (self.reads.is_empty() || self.passed >= READS_IN_A_ROW);
            let queue = if write { &mut self.writes } else { &mut self.reads };
            let Some(&request) = queue.front() else { break };
            let bytes = request.bytes();
            let after = self.bytes_in_flight.saturating_add(bytes);
            if after > self.limits.bytes && self.bytes_in_flight > 0 {
                break;
            }
            queue.pop_front();
            self.passed = if write || self.writes.is_empty() { 0 } else { self.passed + 1 };
            let mut vector = Box::new([part_of_nothing(), part_of_nothing()]);
            let Some((entry, second)) = self.kernel.entries(&request, &mut vector) else {
                self.completed.push(request.ended(-i64::from(libc::EBADF)));
                continue;
            };
            self.free.pop();
            let berth = &mut self.berths[index];
            berth.generation = berth.generation.wrapping_add(1) & GENERATIONS;
            let first = name(index, berth.generation);
            let entries = 1 + u32::from(second.is_some());
            berth.flight = Some(Flight { request, _vector: vector, entries, result: 0 });
            self.bytes_in_flight += bytes;
            self.push(&entry.user_data(first))?;
            if let Some(second) = second {
                self.push(&second.user_data(first | SECOND))?;
            }
        }
        Ok(())
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // What an entry points to lives in its berth or in this worker.
        while unsafe { self.kernel.ring.submission().push(entry) }.is_err() {
            match self.kernel.ring.submit() {
                Ok(_) => {}
                // Completions have to be taken first.
                Err(error) if passing(&error) => self.reap(),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn reap(&mut self) {
        for completion in self.kernel.ring.completion() {
            match completion.user_data() {
                WAKE => self.wake_armed = false,
                CANCELLED => {}
                transfer => {
                    let index = (transfer & BERTH) as usize;
                    let Some(berth) = self.berths.get_mut(index) else { continue };
                    let Some(flight) = &mut berth.flight else { continue };
                    flight.add(i64::from(completion.result()));
                    if flight.entries == 0 {
                        self.completed.push(flight.request.ended(flight.result));
                        self.bytes_in_flight -= flight.request.bytes();
                        berth.flight = None;
                        self.free.push(index);
                    }
                }
            }
        }
    }
}

const GENERATIONS: u32 = 0x7FFF_FFFF;
/// Names the second entry of a transfer.
const SECOND: u64 = 1 << 31;
const BERTH: u64 = SECOND - 1;

impl Flight {
    /// One of its entries has ended.
    fn add(&mut self, result: i64) {
        self.entries -= 1;
        if self.result >= 0 {
            self.result = if result < 0 { result } else { self.result + result };
        }
    }
}

fn name(index: usize, generation: u32) -> u64 {
    u64::from(generation) << 32 | index as u64
}

/// Says the kernel: not now.
fn passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME))
}

fn part_of_nothing() -> libc::iovec {
    libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }
}
