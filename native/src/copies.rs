//! Batches of copies and checksums, without the interpreter's lock.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffers::{Span, answers, numbers, readable, writable};
use crate::xxh3::{Kernel, Store, copy};

/// Copy pieces of `length` bytes from one buffer to another; checksums of the copies.
///
/// Piece i goes from `source_offsets[i]` to `target_offsets[i]` (bytes, arrays of uint64), its
/// XXH3-64 into `sums[i]` (an array of uint64). Every byte of the source is read once, so the
/// checksum is that of the copy whatever others write there meanwhile. With `streaming` the target
/// is written past the processor's cache. `kernel` is one of `kernels()`, by default the last.
///
/// Raises IndexError, before anything is copied, when a piece reaches past the end of a buffer,
/// and ValueError for arrays of the wrong kind or size and for pieces that overlap.
#[pyfunction]
#[pyo3(signature = (source, source_offsets, target, target_offsets, length, sums, streaming=false, kernel=None))]
#[allow(clippy::too_many_arguments)]
pub fn copy_checksums(
    py: Python<'_>,
    source: &Bound<'_, PyAny>,
    source_offsets: &Bound<'_, PyAny>,
    target: &Bound<'_, PyAny>,
    target_offsets: &Bound<'_, PyAny>,
    length: usize,
    sums: &Bound<'_, PyAny>,
    streaming: bool,
    kernel: Option<&str>,
) -> PyResult<()> {
    let kernel = chosen(kernel)?;
    let from = numbers(source_offsets, "source_offsets")?;
    let to = numbers(target_offsets, "target_offsets")?;
    if from.len() != to.len() {
        return Err(PyValueError::new_err(format!(
            "{} source_offsets for {} target_offsets",
            from.len(),
            to.len()
        )));
    }
    let source = PyUntypedBuffer::get(source)?;
    let target = PyUntypedBuffer::get(target)?;
    let sums = PyUntypedBuffer::get(sums)?;
    let reads = readable(&source, "source")?;
    let writes = writable(&target, "target")?;
    let results = answers(&sums, from.len(), "sums")?;
    reads.check(&from, length, "source")?;
    writes.check(&to, length, "target")?;
    if results.overlaps(reads) || results.overlaps(writes) {
        return Err(PyValueError::new_err("sums must not overlap source or target"));
    }
    if reads.pieces_overlap(&from, writes, &to, length) {
        return Err(PyValueError::new_err("pieces of source and target overlap"));
    }
    let store = if streaming { Store::Streaming } else { Store::Cached };
    py.detach(|| {
        for (i, (&from, &to)) in from.iter().zip(&to).enumerate() {
            unsafe {
                let sum = copy(kernel, reads.at(from), writes.at(to), length, store);
                put(results, i, sum);
            }
        }
    });
    Ok(())
}

/// XXH3-64 of pieces of `length` bytes at `offsets` (array of uint64) of a buffer, into `sums`.
///
/// Raises IndexError when a piece reaches past the end, ValueError for arrays of the wrong kind or
/// size and when `sums` overlaps the source.
#[pyfunction]
#[pyo3(signature = (source, offsets, length, sums, kernel=None))]
pub fn checksums(
    py: Python<'_>,
    source: &Bound<'_, PyAny>,
    offsets: &Bound<'_, PyAny>,
    length: usize,
    sums: &Bound<'_, PyAny>,
    kernel: Option<&str>,
) -> PyResult<()> {
    let kernel = chosen(kernel)?;
    let offsets = numbers(offsets, "offsets")?;
    let source = PyUntypedBuffer::get(source)?;
    let sums = PyUntypedBuffer::get(sums)?;
    let reads = readable(&source, "source")?;
    let results = answers(&sums, offsets.len(), "sums")?;
    reads.check(&offsets, length, "source")?;
    if results.overlaps(reads) {
        return Err(PyValueError::new_err("source and sums must not overlap"));
    }
    py.detach(|| {
        for (i, &offset) in offsets.iter().enumerate() {
            unsafe { put(results, i, sum(kernel, reads.at(offset), length)) };
        }
    });
    Ok(())
}

/// XXH3-64 of a contiguous buffer.
#[pyfunction]
pub fn checksum(py: Python<'_>, source: &Bound<'_, PyAny>) -> PyResult<u64> {
    const WORTH_UNLOCKING: usize = 64 << 10;
    let source = PyUntypedBuffer::get(source)?;
    let reads = readable(&source, "source")?;
    if reads.length < WORTH_UNLOCKING {
        return Ok(unsafe { sum(Kernel::best(), reads.start, reads.length) });
    }
    Ok(py.detach(move || {
        let reads = reads;
        unsafe { sum(Kernel::best(), reads.start, reads.length) }
    }))
}

/// The instructions that this processor has for it, slowest first: of `portable`, `avx2`, `avx512`.
#[pyfunction]
pub fn kernels() -> Vec<&'static str> {
    Kernel::available().into_iter().map(Kernel::name).collect()
}

fn chosen(name: Option<&str>) -> PyResult<Kernel> {
    name.map_or(Ok(Kernel::best()), |name| {
        Kernel::named(name)
            .ok_or_else(|| PyValueError::new_err(format!("no kernel {name:?}; see kernels()")))
    })
}

unsafe fn sum(kernel: Kernel, start: *const u8, length: usize) -> u64 {
    unsafe { copy(kernel, start, std::ptr::null_mut(), length, Store::None) }
}

unsafe fn put(results: Span, i: usize, sum: u64) {
    unsafe { results.at(8 * i as u64).cast::<u64>().write_unaligned(sum) }
}
