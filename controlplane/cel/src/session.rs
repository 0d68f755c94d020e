//! The variables of a request, and values that several expressions share.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use crate::eval_error::Evaluated;
use crate::program::Program;
use crate::value::Value;

/// Compiled expressions whose values other expressions use as `variables.name`.
///
/// Each expression may use the values of the expressions that were added before it.
#[derive(Clone, Debug, Default)]
pub struct Shared {
    programs: BTreeMap<Box<str>, Program>,
}

/// The variables of a request. A shared value is evaluated when the first expression uses it, and then kept.
pub struct Session<'a> {
    pub(crate) variables: Vec<(&'a str, Value<'a>)>,
    shared: &'a Shared,
    values: RefCell<HashMap<&'a str, Evaluated<'a>>>,
}

// === impl Shared ===

impl Shared {
    /// Adds a value. The name must be declared by [`crate::Environment::shared`] for later expressions.
    pub fn add(&mut self, name: &str, program: Program) {
        self.programs.insert(name.into(), program);
    }

    pub(crate) fn find(&self, name: &str) -> Option<(&str, &Program)> {
        self.programs.get_key_value(name).map(|(name, program)| (&**name, program))
    }
}

// === impl Session ===

impl<'a> Session<'a> {
    /// A session with these variables.
    pub fn new(variables: Vec<(&'a str, Value<'a>)>, shared: &'a Shared) -> Session<'a> {
        Session { variables, shared, values: RefCell::default() }
    }

    pub(crate) fn shared(&self) -> &'a Shared {
        self.shared
    }

    pub(crate) fn known(&self, name: &str) -> Option<Evaluated<'a>> {
        self.values.borrow().get(name).cloned()
    }

    pub(crate) fn keep(&self, name: &'a str, value: Evaluated<'a>) {
        self.values.borrow_mut().insert(name, value);
    }
}
