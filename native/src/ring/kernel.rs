//! An io_uring with what this kernel has of it: files and buffers registered or not.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, opcode, types};

use super::requests::{Operation, Request};

/// The kernel takes no larger buffer.
const CHUNK_BYTES: usize = 1 << 30;
/// Chunks that may be registered at a time: as many GiB.
const CHUNKS: u32 = 4096;

/// Registered memory: transfers that lie inside need no pages looked up.
struct Chunk {
    start: usize,
    length: usize,
    slot: u32,
}

/// The table of files. Without registration the descriptors are kept open here.
enum Files {
    Registered,
    Open(Vec<Option<OwnedFd>>),
}

pub struct Kernel {
    pub ring: IoUring,
    files: Files,
    chunks: Vec<Chunk>,
    free_slots: Vec<u32>,
    /// Completions are worked off by the waiting thread, not by an interrupt of it.
    pub deferred: bool,
}

impl Kernel {
    /// Must be called by the thread that is to use it. Raises what the kernel says: ENOSYS for one
    /// without io_uring, EPERM where it is forbidden.
    pub fn new(entries: u32, files: u32) -> io::Result<Self> {
        let (ring, deferred) = setup(entries)?;
        let files = match ring.submitter().register_files_sparse(files) {
            Ok(()) => Files::Registered,
            Err(_) => Files::Open((0..files).map(|_| None).collect()),
        };
        let free_slots = match ring.submitter().register_buffers_sparse(CHUNKS) {
            Ok(()) => (0..CHUNKS).rev().collect(),
            Err(_) => Vec::new(),
        };
        Ok(Self { ring, files, chunks: Vec::new(), free_slots, deferred })
    }

    pub fn files_registered(&self) -> bool {
        matches!(self.files, Files::Registered)
    }

    /// Errors show in the transfers: EBADF.
    pub fn add_file(&mut self, index: u32, file: OwnedFd) {
        match &mut self.files {
            Files::Registered => {
                let _ = self.ring.submitter().register_files_update(index, &[file.as_raw_fd()]);
            }
            Files::Open(table) => table[index as usize] = Some(file),
        }
    }

    /// The kernel keeps the file for what is in flight.
    pub fn drop_file(&mut self, index: u32) {
        match &mut self.files {
            Files::Registered => {
                let _ = self.ring.submitter().register_files_update(index, &[-1]);
            }
            Files::Open(table) => table[index as usize] = None,
        }
    }

    /// Register memory, all or nothing: ENOMEM where more may not be locked, ENOSYS where the
    /// kernel is too old.
    pub fn pin(&mut self, start: usize, length: usize) -> Result<(), i32> {
        let before = self.chunks.len();
        let mut done = 0;
        while done < length {
            let step = CHUNK_BYTES.min(length - done);
            let outcome = match self.free_slots.pop() {
                Some(slot) => self.register(slot, start + done, step),
                None => Err(libc::ENOSYS),
            };
            if let Err(error) = outcome {
                for chunk in self.chunks.split_off(before) {
                    self.unregister(&chunk);
                }
                return Err(error);
            }
            done += step;
        }
        Ok(())
    }

    /// Let go of every chunk that touches this memory. The kernel keeps the pages for what is in
    /// flight.
    pub fn unpin(&mut self, start: usize, length: usize) {
        let touches =
            |chunk: &Chunk| chunk.start < start + length && start < chunk.start + chunk.length;
        let (gone, kept) = std::mem::take(&mut self.chunks).into_iter().partition(touches);
        self.chunks = kept;
        let gone: Vec<Chunk> = gone;
        for chunk in &gone {
            self.unregister(chunk);
        }
    }

    fn register(&mut self, slot: u32, start: usize, length: usize) -> Result<(), i32> {
        match self.update(slot, start, length) {
            Ok(()) => {
                self.chunks.push(Chunk { start, length, slot });
                Ok(())
            }
            Err(error) => {
                self.free_slots.push(slot);
                Err(error.raw_os_error().unwrap_or(libc::EIO))
            }
        }
    }

    fn unregister(&mut self, chunk: &Chunk) {
        if self.update(chunk.slot, 0, 0).is_ok() {
            self.free_slots.push(chunk.slot);
        }
    }

    fn update(&self, slot: u32, start: usize, length: usize) -> io::Result<()> {
        let memory =
            libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(start), iov_len: length };
        // The memory is that of buffers that are given back only after the ring's end.
        unsafe { self.ring.submitter().register_buffers_update(slot, &[memory], None) }
    }

    /// The entries of a request: one, or two where its payload lies in registered memory and a header
    /// goes in front of it, for a vector cannot be of registered memory before 6.15, and never of two
    /// buffers. The two are neighbours in the file and are given to the kernel together, which makes
    /// one transfer of the drive of them. `vector` stays where it is until the entry is submitted.
    /// None: the file has gone.
    pub fn entries(
        &self,
        request: &Request,
        vector: &mut [libc::iovec; 2],
    ) -> Option<(Entry, Option<Entry>)> {
        let (file, flags) = match &self.files {
            Files::Registered => (types::Fd(request.file as RawFd), Flags::FIXED_FILE),
            Files::Open(table) => {
                (types::Fd(table[request.file as usize].as_ref()?.as_raw_fd()), Flags::empty())
            }
        };
        let offset = request.file_offset;
        if request.operation == Operation::Flush {
            let flush = opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC);
            return Some((flush.build().flags(flags), None));
        }
        let writes = request.operation == Operation::Write;
        let one = |start: usize, length: u32, offset: u64| {
            let memory = std::ptr::with_exposed_provenance_mut::<u8>(start);
            let entry = match (self.slot_of(start, length as usize), writes) {
                (Some(slot), true) => {
                    opcode::WriteFixed::new(file, memory, length, slot).offset(offset).build()
                }
                (Some(slot), false) => {
                    opcode::ReadFixed::new(file, memory, length, slot).offset(offset).build()
                }
                (None, true) => opcode::Write::new(file, memory, length).offset(offset).build(),
                (None, false) => opcode::Read::new(file, memory, length).offset(offset).build(),
            };
            entry.flags(flags)
        };
        if request.header_length == 0 {
            return Some((one(request.payload, request.payload_length, offset), None));
        }
        let header = || one(request.header, request.header_length, offset);
        if request.payload_length == 0 {
            return Some((header(), None));
        }
        if self.slot_of(request.payload, request.payload_length as usize).is_some() {
            let behind = offset + u64::from(request.header_length);
            let payload = one(request.payload, request.payload_length, behind);
            return Some((header(), Some(payload)));
        }
        *vector = [
            part(request.header, request.header_length),
            part(request.payload, request.payload_length),
        ];
        let entry = if writes {
            opcode::Writev::new(file, vector.as_ptr(), 2).offset(offset).build()
        } else {
            opcode::Readv::new(file, vector.as_ptr(), 2).offset(offset).build()
        };
        Some((entry.flags(flags), None))
    }

    /// The registered buffer that holds all of this memory.
    fn slot_of(&self, start: usize, length: usize) -> Option<u16> {
        let holds =
            |chunk: &&Chunk| chunk.start <= start && start + length <= chunk.start + chunk.length;
        self.chunks.iter().find(holds).and_then(|chunk| u16::try_from(chunk.slot).ok())
    }
}

fn part(start: usize, length: u32) -> libc::iovec {
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(start), iov_len: length as usize }
}

/// One thread submits and waits: kernels from 6.1 on save interrupts and locks then.
fn setup(entries: u32) -> io::Result<(IoUring, bool)> {
    let newest = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
    match newest {
        Ok(ring) => Ok((ring, true)),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            IoUring::builder().build(entries).map(|ring| (ring, false))
        }
        Err(error) => Err(error),
    }
}
