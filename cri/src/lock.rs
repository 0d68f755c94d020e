//! Short critical sections: a lock whose holder panicked is still usable, since every value behind
//! one is replaced as a whole.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes `mutex`, whatever became of its last holder.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
