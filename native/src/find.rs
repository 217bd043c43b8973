//! The index of a page table: from keys to rows, rows into it and out of it.
//!
//! What numpy does in rounds over a whole batch (`kvtier_agent.cache`: the fallback, and the oracle
//! of the tests) goes key by key here, and a batch waits for memory once rather than at each step:
//! what a block of keys needs next is asked for before the first of them is looked at.
//!
//! The table lies in shared memory, and a reader walks an index that another process is rebuilding
//! meanwhile. So every number that comes from it is checked before it says where to look, and a walk
//! ends after as many steps as there are places.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyAssertionError, PyIndexError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::buffers::{Span, readable, writable};

const EMPTY: u32 = u32::MAX;
const TOMB: u32 = u32::MAX - 1;
const KEY_BYTES: usize = 16;
/// Keys that are looked at together.
const BLOCK: usize = 32;
/// Keys from which on it pays to let other threads of Python run.
const WORTH_UNLOCKING: usize = 8192;

/// Where things lie in the table's memory, in bytes from its start.
#[derive(Clone, Copy)]
struct Table {
    memory: Span,
    records: usize,
    record_bytes: usize,
    key: usize,
    max_pages: u32,
    index: usize,
    places: u64,
    seed: usize,
    slots: usize,
}

impl Table {
    fn word(&self, offset: usize) -> u64 {
        unsafe { &*self.memory.start.add(offset).cast::<AtomicU64>() }.load(Ordering::Relaxed)
    }

    fn place(&self, place: u64) -> &AtomicU32 {
        unsafe { &*self.memory.start.add(self.index + 4 * place as usize).cast::<AtomicU32>() }
    }

    /// Of a row below `max_pages`.
    fn record(&self, row: u32) -> usize {
        self.records + row as usize * self.record_bytes
    }

    fn key_of(&self, row: u32) -> [u64; 2] {
        let at = self.record(row) + self.key;
        [self.word(at), self.word(at + 8)]
    }

    /// Seed and mask of the index as it is now.
    fn hashing(&self) -> PyResult<Hashing> {
        let slots = self.word(self.slots);
        if !slots.is_power_of_two() || slots > self.places {
            return Err(PyIndexError::new_err(format!(
                "the index has {slots} slots, of which a table has a power of two up to {}",
                self.places
            )));
        }
        Ok(Hashing { seed: self.word(self.seed), mask: slots - 1 })
    }

    /// Calls `found` with the number of each key and its row, or EMPTY for a key that is absent.
    fn find(&self, keys: &Keys, hashing: Hashing, mut found: impl FnMut(usize, u32)) {
        let mut wheres = [0_u64; BLOCK];
        let mut rows = [EMPTY; BLOCK];
        let mut first = 0;
        while first < keys.count {
            let size = BLOCK.min(keys.count - first);
            let (wheres, rows) = (&mut wheres[..size], &mut rows[..size]);
            for (i, home) in wheres.iter_mut().enumerate() {
                *home = hashing.home(keys.get(first + i));
                prefetch(self.place(*home).as_ptr().cast());
            }
            for (row, &home) in rows.iter_mut().zip(wheres.iter()) {
                *row = self.place(home).load(Ordering::Acquire);
                if *row < self.max_pages {
                    prefetch(unsafe { self.memory.start.add(self.record(*row)) });
                }
            }
            for (i, (&row, &home)) in rows.iter().zip(wheres.iter()).enumerate() {
                let number = first + i;
                found(number, self.walk(keys.get(number), home, row, hashing.mask));
            }
            first += size;
        }
    }

    /// The row of a key whose search begins at `place`, where `row` stands.
    fn walk(&self, key: [u64; 2], mut place: u64, mut row: u32, mask: u64) -> u32 {
        for _ in 0..=mask {
            if row == EMPTY || (row < self.max_pages && self.key_of(row) == key) {
                return row;
            }
            place = (place + 1) & mask;
            row = self.place(place).load(Ordering::Acquire);
        }
        EMPTY
    }
}

#[derive(Clone, Copy)]
struct Hashing {
    seed: u64,
    mask: u64,
}

impl Hashing {
    /// As `index_hash.home`.
    fn home(self, key: [u64; 2]) -> u64 {
        let mut word = (key[0] ^ self.seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        word ^= word >> 32;
        word = word.wrapping_add(key[1]).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        word ^= word >> 32;
        word & self.mask
    }
}

/// Keys of 16 bytes in a row.
struct Keys {
    memory: Span,
    count: usize,
}

impl Keys {
    fn of(buffer: &PyUntypedBuffer) -> PyResult<Self> {
        let memory = readable(buffer, "keys")?;
        if !memory.length.is_multiple_of(KEY_BYTES) {
            return Err(PyValueError::new_err("keys must have 16 bytes each"));
        }
        Ok(Keys { memory, count: memory.length / KEY_BYTES })
    }

    fn get(&self, i: usize) -> [u64; 2] {
        unsafe { self.memory.start.add(i * KEY_BYTES).cast::<[u64; 2]>().read_unaligned() }
    }
}

/// The index of one page table, over the memory that it lies in.
///
/// `Index(buffer, records=.., record_bytes=.., key=.., max_pages=.., index=.., places=.., seed=..,
/// slots=..)`: offsets in bytes of the records, of the key within a record, of the index, and of the
/// two numbers of the header that say how keys are hashed and how much of the index is in use
/// (`places`: its most). Raises ValueError for a table that does not fit into the buffer.
///
/// One thread of one process writes; `find` and `bytes` may be called by anybody at any time, and
/// mean something if nothing was rebuilt meanwhile.
#[pyclass(frozen, module = "kvtier_native")]
pub struct Index {
    table: Table,
    may_write: bool,
    /// Exported as long as this lives.
    _held: PyUntypedBuffer,
}

#[pymethods]
impl Index {
    #[new]
    #[pyo3(signature = (buffer, *, records, record_bytes, key, max_pages, index, places, seed, slots))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        buffer: &Bound<'_, PyAny>,
        records: usize,
        record_bytes: usize,
        key: usize,
        max_pages: u32,
        index: usize,
        places: u32,
        seed: usize,
        slots: usize,
    ) -> PyResult<Self> {
        let held = PyUntypedBuffer::get(buffer)?;
        let memory = readable(&held, "buffer")?;
        let (many, places) = (u64::from(max_pages), u64::from(places));
        let end = many.checked_mul(record_bytes as u64).and_then(|n| n.checked_add(records as u64));
        let index_end = (index as u64).checked_add(4 * places);
        let size = memory.length as u64;
        let fits = max_pages < TOMB
            && end.is_some_and(|end| end <= size)
            && index_end.is_some_and(|end| end <= size)
            && key.checked_add(KEY_BYTES).is_some_and(|end| end <= record_bytes)
            && [seed, slots].iter().all(|&at| at.checked_add(8).is_some_and(|e| e as u64 <= size));
        if !fits {
            return Err(PyValueError::new_err("the table reaches past the end of the buffer"));
        }
        let words = [memory.start.addr(), records, record_bytes, key, seed, slots];
        if words.iter().any(|at| !at.is_multiple_of(8)) || !index.is_multiple_of(4) {
            return Err(PyValueError::new_err("a table must be aligned"));
        }
        let table =
            Table { memory, records, record_bytes, key, max_pages, index, places, seed, slots };
        Ok(Index { table, may_write: !held.readonly(), _held: held })
    }

    /// The row of each key into `rows` (an array of uint32), 0xFFFFFFFF where it is absent.
    fn find(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (keys, rows) = (PyUntypedBuffer::get(keys)?, PyUntypedBuffer::get(rows)?);
        let keys = Keys::of(&keys)?;
        let out = apart(elements(&rows, 4, keys.count, "rows")?, &keys)?;
        let hashing = self.table.hashing()?;
        unlocked(py, keys.count, || {
            self.table.find(&keys, hashing, |i, row| unsafe {
                out.at(4 * i as u64).cast::<u32>().write_unaligned(row);
            });
        });
        Ok(())
    }

    /// One byte of each key's record into `out` (an array of uint8): the one at `offset`; 0 for a
    /// key that is absent.
    fn bytes(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        offset: usize,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (keys, out) = (PyUntypedBuffer::get(keys)?, PyUntypedBuffer::get(out)?);
        let keys = Keys::of(&keys)?;
        let out = apart(elements(&out, 1, keys.count, "out")?, &keys)?;
        if offset >= self.table.record_bytes {
            return Err(PyIndexError::new_err(format!("a record has no byte {offset}")));
        }
        let hashing = self.table.hashing()?;
        unlocked(py, keys.count, || {
            self.table.find(&keys, hashing, |i, row| unsafe {
                let byte = if row == EMPTY {
                    0
                } else {
                    let at = self.table.memory.start.add(self.table.record(row) + offset);
                    (*at.cast::<AtomicU8>()).load(Ordering::Relaxed)
                };
                out.at(i as u64).write(byte);
            });
        });
        Ok(())
    }

    /// Rows (an array of uint32) into the index, by the keys in their records. (whether all of them
    /// are in it, how many tombstones they took the places of).
    ///
    /// Given up, with some of them in, when one has no place after `most` steps, or more than
    /// `late` of them have none after `early`. Raises IndexError for a row that there is not.
    fn link(
        &self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        most: u64,
        early: u64,
        late: u64,
    ) -> PyResult<(bool, u64)> {
        let rows = self.rows(rows)?;
        let hashing = self.table.hashing()?;
        let answer = unlocked(py, rows.len(), || {
            let (mut tombs, mut left) = (0_u64, late);
            for block in rows.chunks(BLOCK) {
                let mut wheres = [0_u64; BLOCK];
                for &row in block {
                    prefetch(unsafe { self.table.memory.start.add(self.table.record(row)) });
                }
                for (where_, &row) in wheres.iter_mut().zip(block) {
                    *where_ = hashing.home(self.table.key_of(row));
                    prefetch(self.table.place(*where_).as_ptr().cast());
                }
                for (&home, &row) in wheres.iter().zip(block) {
                    let steps = hashing.mask.saturating_add(1);
                    let open = (0..steps).find(|step| {
                        let place = (home + step) & hashing.mask;
                        self.table.place(place).load(Ordering::Relaxed) >= TOMB
                    });
                    let steps = open?;
                    if steps >= early {
                        if steps >= most || left == 0 {
                            return Some((false, tombs));
                        }
                        left -= 1;
                    }
                    let place = self.table.place((home + steps) & hashing.mask);
                    tombs += u64::from(place.load(Ordering::Relaxed) == TOMB);
                    place.store(row, Ordering::Release);
                }
            }
            Some((true, tombs))
        });
        answer.ok_or_else(|| PyRuntimeError::new_err("the index is full"))
    }

    /// Rows (an array of uint32) out of the index; a tombstone takes the place of each. Raises
    /// AssertionError for one that is not in it, IndexError for one that there is not.
    fn unlink(&self, py: Python<'_>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let rows = self.rows(rows)?;
        let hashing = self.table.hashing()?;
        let all = unlocked(py, rows.len(), || {
            rows.iter().all(|&row| {
                let home = hashing.home(self.table.key_of(row));
                for step in 0..=hashing.mask {
                    let place = self.table.place((home + step) & hashing.mask);
                    match place.load(Ordering::Relaxed) {
                        EMPTY => return false,
                        held if held == row => {
                            place.store(TOMB, Ordering::Release);
                            return true;
                        }
                        _ => {}
                    }
                }
                false
            })
        });
        if all { Ok(()) } else { Err(PyAssertionError::new_err(NOT_THERE)) }
    }
}

const NOT_THERE: &str = "a row to be unlinked is not in the index";

impl Index {
    /// A copy of an array of rows, all of them of this table.
    fn rows(&self, rows: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        if !self.may_write {
            return Err(PyValueError::new_err("this process may only read the table"));
        }
        let buffer = PyUntypedBuffer::get(rows)?;
        let count = buffer.item_count();
        let span = readable(&buffer, "rows")?;
        sized(&buffer, 4, count, "rows")?;
        let first = span.start.cast::<u32>().cast_const();
        let rows: Vec<u32> = (0..count).map(|i| unsafe { first.add(i).read_unaligned() }).collect();
        match rows.iter().find(|&&row| row >= self.table.max_pages) {
            None => Ok(rows),
            Some(row) => Err(PyIndexError::new_err(format!(
                "row {row} of a table of {} pages",
                self.table.max_pages
            ))),
        }
    }
}

/// The memory of a writable array of `count` elements of so many bytes.
fn elements(buffer: &PyUntypedBuffer, bytes: usize, count: usize, what: &str) -> PyResult<Span> {
    sized(buffer, bytes, count, what)?;
    writable(buffer, what)
}

fn sized(buffer: &PyUntypedBuffer, bytes: usize, count: usize, what: &str) -> PyResult<()> {
    if buffer.item_size() == bytes && buffer.item_count() == count {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("{what} must be {count} elements of {bytes} bytes")))
}

/// `out`, if it shares no byte with the keys.
fn apart(out: Span, keys: &Keys) -> PyResult<Span> {
    if out.overlaps(keys.memory) {
        return Err(PyValueError::new_err("what is written must not overlap the keys"));
    }
    Ok(out)
}

/// Without the interpreter's lock where that is worth it.
fn unlocked<T: Send>(py: Python<'_>, count: usize, work: impl FnOnce() -> T + Send) -> T {
    if count < WORTH_UNLOCKING { work() } else { py.detach(work) }
}

#[inline(always)]
fn prefetch(_at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(_at.cast());
    }
}
