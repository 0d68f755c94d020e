//! Limits the creates that wait for the initializers of their object.
//!
//! | part | module |
//! |---|---|
//! | adds initializers to new objects, protects `metadata.initializers` | `admit/initializers.rs` |
//! | hides uninitialized objects from lists and watches | `cache/collection.rs`, `Scope` |
//! | the wait of a create, the removal of rejected objects | `write/initialization.rs` |
//! | removes objects that were rejected before a crash | `controllers/initialization.rs` |
//!
//! All of it exists only with the admission plugin `Initializers`.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    authn::User,
    error::{ApiError, Result},
    in_flight,
};

/// Maximum creates of one user, or of all service accounts of a namespace, that wait at one time.
const MAX_WAITS_OF_USER: usize = 16;
/// Maximum creates of all users that wait at one time.
const MAX_WAITS: usize = 128;

/// The waiting creates.
#[derive(Default)]
pub(crate) struct Initialization {
    waits: Mutex<Waits>,
}

#[derive(Default)]
struct Waits {
    total: usize,
    owners: HashMap<String, usize>,
}

/// The permission of a create to wait. Dropping it releases the slot.
pub(crate) struct WaitPermit {
    initialization: Arc<Initialization>,
    owner: String,
}

// === impl Initialization ===

impl Initialization {
    /// Reserves a slot for a create, or refuses the create if too many creates of its user wait. `None` for the
    /// controllers of this process, which do not wait. The controllers share one user, so the initializers of one kind
    /// would block the controllers of all other kinds.
    pub(crate) fn enter(self: &Arc<Self>, user: &User) -> Result<Option<WaitPermit>> {
        if user.is_component() {
            return Ok(None);
        }
        let owner = in_flight::owner(&user.name);
        let mut waits = self.lock();
        let of_owner = waits.owners.get(owner).copied().unwrap_or_default();
        if of_owner >= MAX_WAITS_OF_USER || waits.total >= MAX_WAITS {
            return Err(ApiError::too_many_requests());
        }
        waits.total += 1;
        waits.owners.insert(owner.to_owned(), of_owner + 1);
        drop(waits);
        Ok(Some(WaitPermit { initialization: self.clone(), owner: owner.to_owned() }))
    }

    fn lock(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl WaitPermit ===

impl Drop for WaitPermit {
    fn drop(&mut self) {
        let mut waits = self.initialization.lock();
        waits.total = waits.total.saturating_sub(1);
        if let Some(of_owner) = waits.owners.get_mut(&self.owner) {
            *of_owner = of_owner.saturating_sub(1);
            if *of_owner == 0 {
                waits.owners.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_creates_of_a_user_that_wait_are_limited() {
        let initialization = Arc::new(Initialization::default());
        let enter = |name: &str| initialization.enter(&User::new(name, &[]));
        let of_eve: Vec<_> = (0..MAX_WAITS_OF_USER).map(|_| enter("eve").ok().unwrap()).collect();
        assert_eq!(enter("eve").err().unwrap().code, 429);
        let account = |name: &str| format!("system:serviceaccount:ns:{name}");
        let of_accounts: Vec<_> =
            (0..MAX_WAITS_OF_USER).map(|number| enter(&account(&number.to_string())).ok().unwrap()).collect();
        assert!(enter(&account("other")).is_err(), "the accounts of a namespace count as one user");
        let others: Vec<_> =
            (0..MAX_WAITS).map_while(|number| enter(&format!("user-{number}")).ok()).collect();
        assert_eq!(of_eve.len() + of_accounts.len() + others.len(), MAX_WAITS);
        assert!(initialization.enter(&User::controllers()).is_ok_and(|permit| permit.is_none()));
        drop((of_eve, of_accounts, others));
        let waits = initialization.lock();
        assert!(waits.total == 0 && waits.owners.is_empty());
    }
}
