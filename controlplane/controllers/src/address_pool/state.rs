//! The state that the controller keeps between reconciles.

use std::collections::HashMap;
use std::sync::Mutex;

use super::claims::Claims;
use crate::object::Key;

/// State of the controller between reconciles.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(super) claims: Mutex<Claims>,
    /// The last refusal of each service, so that an event is recorded once.
    pub(super) refusals: Mutex<HashMap<Key, String>>,
}
