//! Locking for short critical sections. A lock stays usable after a panic of its holder, because each value is replaced
//! as a whole.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, even after a panic of its last holder.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
