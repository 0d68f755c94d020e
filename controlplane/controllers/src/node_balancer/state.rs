//! The state that the controller keeps between reconciles.

use std::collections::HashMap;
use std::sync::Mutex;

use super::claims::Claims;
use crate::object::Key;

/// The state that the controller keeps between reconciles.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(super) claims: Mutex<Claims>,
    /// The last refusal of each service, so that its event is recorded only once.
    pub(super) refusals: Mutex<HashMap<Key, String>>,
}
