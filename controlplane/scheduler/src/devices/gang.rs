//! Claims that the pods of a gang share while the gang is placed and bound.

use coracle_values::object::Key;

use super::{Devices, Reservations};

impl Devices {
    /// Lets the other pods of a gang use the claims that one pod of the gang allocates. [`Self::end_sharing`] ends the
    /// sharing.
    pub(crate) fn share(&self, reserved: &Reservations) {
        let chosen = reserved.iter().filter(|(_, allocation)| allocation.is_some());
        self.lock().shared.extend(chosen.map(|(key, _)| key.clone()));
    }

    /// Ends [`Self::share`] for all claims.
    pub(crate) fn end_sharing(&self) {
        self.lock().shared.clear();
    }

    /// Waits until the pod that allocates a shared claim has written the allocation, or has failed.
    pub(crate) async fn wait_for_allocation(&self, key: &Key) {
        let mut changes = self.changes();
        loop {
            let is_pending = self.lock().is_pending(key);
            if !is_pending || changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Undoes a reservation that no binding used. The devices are as before the reservation, so no other pod becomes
    /// schedulable.
    pub(crate) fn undo(&self, reserved: &Reservations) {
        let mut state = self.lock();
        let pending = state.pending.clone();
        state.release(reserved);
        state.pending = pending;
    }
}
