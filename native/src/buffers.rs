//! Python buffers as bytes, and the bounds of every access to them.
//!
//! A `PyUntypedBuffer` holds its exporter: the memory stays where it is until it is dropped, also
//! while the interpreter's lock is released.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

/// The memory of a buffer, to be carried into code that runs without the interpreter's lock.
#[derive(Clone, Copy)]
pub struct Span {
    pub start: *mut u8,
    pub length: usize,
}

// The buffer that it came from outlives its use; what other threads write there is their affair.
unsafe impl Send for Span {}
unsafe impl Sync for Span {}

impl Span {
    /// The address of `offset`, which `check` has found good.
    ///
    /// # Safety
    /// `offset` is at most `length`.
    pub unsafe fn at(self, offset: u64) -> *mut u8 {
        unsafe { self.start.add(offset as usize) }
    }

    pub fn overlaps(self, other: Span) -> bool {
        let (a, b) = (self.start.addr(), other.start.addr());
        self.length > 0 && other.length > 0 && a < b + other.length && b < a + self.length
    }

    /// Does any piece of `length` bytes at `offsets` share a byte with one of the other buffer?
    pub fn pieces_overlap(
        self,
        offsets: &[u64],
        other: Span,
        others: &[u64],
        length: usize,
    ) -> bool {
        if length == 0 || !self.overlaps(other) {
            return false;
        }
        let mut starts: Vec<u64> = others.iter().map(|o| other.start.addr() as u64 + o).collect();
        starts.sort_unstable();
        offsets.iter().any(|offset| {
            let start = self.start.addr() as u64 + offset;
            // All pieces are of one size: the nearest one that ends behind `start` decides.
            let next = starts.partition_point(|&s| s + length as u64 <= start);
            starts.get(next).is_some_and(|&s| s < start + length as u64)
        })
    }

    /// IndexError unless `length` bytes from every offset on lie inside; `what` names the buffer.
    pub fn check(self, offsets: &[u64], length: usize, what: &str) -> PyResult<()> {
        let last = (self.length as u64).checked_sub(length as u64);
        for (i, &offset) in offsets.iter().enumerate() {
            if last.is_none_or(|last| offset > last) {
                return Err(PyIndexError::new_err(format!(
                    "{length} bytes at offset {offset} (number {i}) reach past the end of {what}, \
                     which has {} bytes",
                    self.length
                )));
            }
        }
        Ok(())
    }
}

/// The bytes of a buffer. ValueError when they are not in one piece.
pub fn readable(buffer: &PyUntypedBuffer, what: &str) -> PyResult<Span> {
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err(format!("{what} must be contiguous")));
    }
    Ok(Span { start: buffer.buf_ptr().cast(), length: buffer.len_bytes() })
}

/// The same of one that is to be written to.
pub fn writable(buffer: &PyUntypedBuffer, what: &str) -> PyResult<Span> {
    if buffer.readonly() {
        return Err(PyValueError::new_err(format!("{what} must be writable")));
    }
    readable(buffer, what)
}

/// A copy of an array of uint64: what another thread does to the array afterwards changes nothing.
pub fn numbers(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Vec<u64>> {
    let buffer = PyUntypedBuffer::get(object)?;
    let span = words(&buffer, what)?;
    let first = span.start.cast::<u64>().cast_const();
    Ok((0..span.length / 8).map(|i| unsafe { first.add(i).read_unaligned() }).collect())
}

/// The memory of a writable array of `n` uint64.
pub fn answers(buffer: &PyUntypedBuffer, n: usize, what: &str) -> PyResult<Span> {
    let span = words(buffer, what)?;
    if buffer.readonly() {
        return Err(PyValueError::new_err(format!("{what} must be writable")));
    }
    if span.length / 8 != n {
        return Err(PyValueError::new_err(format!(
            "{what} has {} elements where {n} belong",
            span.length / 8
        )));
    }
    Ok(span)
}

fn words(buffer: &PyUntypedBuffer, what: &str) -> PyResult<Span> {
    let format = buffer.format().to_bytes();
    let unsigned = matches!(format, b"L" | b"Q" | b"<L" | b"<Q" | b"=L" | b"=Q");
    if buffer.item_size() != 8 || !unsigned {
        return Err(PyValueError::new_err(format!("{what} must be an array of uint64")));
    }
    readable(buffer, what)
}
