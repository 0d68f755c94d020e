//! The position of a parser in a document.

use std::fmt;

/// The position of a parser in a document. The position is a chain on the stack. Its text is made only when it is
/// needed.
pub enum TreePath<'a> {
    /// The document.
    Root,
    /// A field of an object.
    Field(&'a TreePath<'a>, &'a str),
    /// An element of a list.
    Item(&'a TreePath<'a>, usize),
}

impl fmt::Display for TreePath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TreePath::Root => Ok(()),
            TreePath::Field(TreePath::Root, name) => f.write_str(name),
            TreePath::Field(parent, name) => write!(f, "{parent}.{name}"),
            TreePath::Item(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_the_fields_and_indexes_from_the_root() {
        let spec = TreePath::Field(&TreePath::Root, "spec");
        let containers = TreePath::Field(&spec, "containers");
        let first = TreePath::Item(&containers, 0);
        assert_eq!(TreePath::Field(&first, "name").to_string(), "spec.containers[0].name");
        assert_eq!(TreePath::Root.to_string(), "");
    }
}
