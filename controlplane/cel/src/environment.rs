//! The variables that expressions may use, and the error of an expression that does not fit them.

use std::collections::BTreeMap;
use std::fmt;

use crate::types::Type;

/// The name under which expressions find shared values: `variables.name`.
pub(crate) const SHARED: &str = "variables";

/// The variables that expressions may use.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    variables: BTreeMap<Box<str>, Type>,
    /// Type and depth of each shared value.
    shared: BTreeMap<Box<str>, (Type, usize)>,
    declares_shared: bool,
    structures: bool,
}

/// The error of an expression that cannot be compiled, with the text of cel-go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileError(pub(crate) String);

// === impl Environment ===

impl Environment {
    /// Declares a variable.
    #[must_use]
    pub fn variable(mut self, name: &str, kind: Type) -> Environment {
        self.variables.insert(name.into(), kind);
        self
    }

    /// Allows expressions to make objects: `Object{…}` and `JSONPatch{…}`.
    #[must_use]
    pub fn with_structures(mut self) -> Environment {
        self.structures = true;
        self
    }

    /// Declares `variables` even if there are no shared values. Otherwise it is an undeclared reference until the first
    /// shared value is declared.
    #[must_use]
    pub fn with_shared(mut self) -> Environment {
        self.declares_shared = true;
        self
    }

    /// Declares `variables.name` with any type, for an expression that does not compile.
    pub fn shared_of_any_type(&mut self, name: &str) {
        self.add_shared(name, Type::Dyn, 0);
    }

    pub(crate) fn has_shared(&self) -> bool {
        self.declares_shared || !self.shared.is_empty()
    }

    pub(crate) fn makes_structures(&self) -> bool {
        self.structures
    }

    pub(crate) fn add_shared(&mut self, name: &str, kind: Type, depth: usize) {
        self.shared.insert(name.into(), (kind, depth));
    }

    /// The depth of a shared value's expression; 0 if it is unknown.
    pub(crate) fn shared_depth(&self, name: &str) -> usize {
        self.shared.get(name).map_or(0, |(_, depth)| *depth)
    }

    /// The type of a shared value.
    pub(crate) fn find_shared(&self, name: &str) -> Option<&Type> {
        self.shared.get(name).map(|(kind, _)| kind)
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Type> {
        self.variables.get(name)
    }
}

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CompileError {}
