//! What kvtier does without the interpreter's lock. `kvtier_agent.native` is the only importer;
//! everything works without this module too, slower.

mod buffers;
mod copies;
mod find;
mod guard;
mod lanes;
mod ring;
mod skewed;
mod xxh3;

use pyo3::prelude::*;

#[pymodule]
mod kvtier_native {
    #[pymodule_export]
    use crate::copies::{checksum, checksums, copy_checksums, kernels};
    #[pymodule_export]
    use crate::find::Index;
    #[pymodule_export]
    use crate::guard::Guard;
    #[pymodule_export]
    use crate::ring::Ring;
}
