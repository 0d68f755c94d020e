//! A set of field paths, and its JSON form `fieldsV1`.

use std::collections::{BTreeMap, btree_map::Entry};

use serde_json::{Map, Value};

use crate::{
    path::{Path, PathElement},
    schema::{Schema, Type, TypeId},
};

/// A set of field paths, kept as a tree.
///
/// A path can be a member while paths below it are members too. For example, the owner of an element of a keyed list
/// owns the element itself and each of its fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldSet(BTreeMap<PathElement, Node>);

/// An element of the first level of a set.
pub(crate) struct ElementRef<'a> {
    pub(crate) element: &'a PathElement,
    pub(crate) is_member: bool,
    /// The paths below the element.
    pub(crate) below: &'a FieldSet,
}

/// A path of the tree. A node is a member, or has children, or both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Node {
    member: bool,
    children: FieldSet,
}

/// `fieldsV1` that is not valid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidFields {
    /// A level of the tree is not a JSON object.
    #[error("fieldsV1 is not an object at {0}")]
    NotAnObject(Path),
    /// A key is none of `.`, `f:…`, `k:…`, `v:…`, `i:…`.
    #[error("fieldsV1 has the invalid key {0:?}")]
    Key(String),
}

static NO_FIELDS: FieldSet = FieldSet(BTreeMap::new());

// === impl FieldSet ===

impl FieldSet {
    /// Whether no path is a member.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a path. The empty path is ignored.
    pub fn insert(&mut self, path: &[PathElement]) {
        let Some((first, rest)) = path.split_first() else { return };
        let node = self.0.entry(first.clone()).or_default();
        if rest.is_empty() {
            node.member = true;
        } else {
            node.children.insert(rest);
        }
    }

    /// Adds a single element.
    pub(crate) fn insert_element(&mut self, element: PathElement) {
        self.0.entry(element).or_default().member = true;
    }

    /// Adds the paths below an element, and the element itself if it is a member.
    pub(crate) fn insert_part(&mut self, element: &PathElement, member: bool, children: FieldSet) {
        self.insert_below(element, children);
        if member {
            self.insert_element(element.clone());
        }
    }

    /// Adds a set below an element.
    pub(crate) fn insert_below(&mut self, element: &PathElement, children: FieldSet) {
        if children.is_empty() {
            return;
        }
        match self.0.entry(element.clone()) {
            Entry::Vacant(entry) => {
                entry.insert(Node { member: false, children });
            }
            Entry::Occupied(mut entry) => entry.get_mut().children.add(&children),
        }
    }

    /// Whether an element of the first level is a member.
    pub(crate) fn has(&self, element: &PathElement) -> bool {
        self.0.get(element).is_some_and(|node| node.member)
    }

    /// Whether a path is a member.
    pub fn contains(&self, path: &[PathElement]) -> bool {
        match path {
            [] => false,
            [last] => self.has(last),
            [first, rest @ ..] => self.below(first).contains(rest),
        }
    }

    /// The paths below an element, without the element.
    pub(crate) fn below(&self, element: &PathElement) -> &FieldSet {
        self.0.get(element).map_or(&NO_FIELDS, |node| &node.children)
    }

    /// The elements of the first level.
    pub(crate) fn elements(&self) -> impl Iterator<Item = ElementRef<'_>> {
        self.0.iter().map(|(element, node)| ElementRef {
            element,
            is_member: node.member,
            below: &node.children,
        })
    }

    /// Adds all paths of another set.
    pub fn add(&mut self, other: &FieldSet) {
        for (element, node) in &other.0 {
            let own = self.0.entry(element.clone()).or_default();
            own.member |= node.member;
            own.children.add(&node.children);
        }
    }

    /// Adds all paths of another set. Takes the other set without a copy if this set is empty.
    pub(crate) fn merge(&mut self, other: FieldSet) {
        if self.is_empty() {
            *self = other;
        } else {
            self.add(&other);
        }
    }

    /// The paths of either set.
    #[must_use]
    pub fn union(mut self, other: &FieldSet) -> FieldSet {
        self.add(other);
        self
    }

    /// The paths that are in both sets.
    #[must_use]
    pub fn intersection(&self, other: &FieldSet) -> FieldSet {
        self.combine(|element, node| {
            let same = other.0.get(element)?;
            Some(Node {
                member: node.member && same.member,
                children: node.children.intersection(&same.children),
            })
        })
    }

    /// The paths that are not in the other set. Paths below a path of the other set stay.
    #[must_use]
    pub fn difference(&self, other: &FieldSet) -> FieldSet {
        let mut rest = self.clone();
        rest.subtract(other);
        rest
    }

    /// Removes the paths of another set. Paths below a path of the other set stay.
    pub(crate) fn subtract(&mut self, other: &FieldSet) {
        if other.is_empty() {
            return;
        }
        self.0.retain(|element, node| {
            let Some(same) = other.0.get(element) else { return true };
            node.member &= !same.member;
            node.children.subtract(&same.children);
            node.member || !node.children.is_empty()
        });
    }

    /// The paths that are neither in the other set nor below one of its paths.
    #[must_use]
    pub fn without_trees(&self, other: &FieldSet) -> FieldSet {
        let mut rest = self.clone();
        rest.remove_trees(other);
        rest
    }

    /// Removes the paths of another set and all paths below them.
    pub(crate) fn remove_trees(&mut self, other: &FieldSet) {
        if other.is_empty() {
            return;
        }
        self.0.retain(|element, node| match other.0.get(element) {
            None => true,
            Some(same) if same.member => false,
            Some(same) => {
                node.children.remove_trees(&same.children);
                node.member || !node.children.is_empty()
            }
        });
    }

    /// Returns a set in which each declared field with members below it is also a member.
    ///
    /// Only the parts of a declared field are owned, not the field itself. Removal and comparison of whole objects need
    /// the fields as members.
    pub(crate) fn with_declared_fields(&self, schema: &Schema, of: TypeId) -> FieldSet {
        let nodes = self.0.iter().map(|(element, node)| {
            let declared = match (schema.get(of), element) {
                (Type::Map { fields, .. }, PathElement::Field(name)) => fields.contains_key(&**name),
                _ => false,
            };
            let below = schema.below(of, element);
            let children = node.children.with_declared_fields(schema, below);
            (element.clone(), Node { member: node.member || declared && !children.is_empty(), children })
        });
        FieldSet(nodes.collect())
    }

    /// Number of paths.
    pub fn len(&self) -> usize {
        self.0.values().map(|node| usize::from(node.member) + node.children.len()).sum()
    }

    /// The first `max` paths, in order; a path comes before the paths below it. Each path has a copy of all its
    /// elements, so all paths of a deep object can take much more memory than the object.
    pub fn paths(&self, max: usize) -> Vec<Path> {
        let mut paths = Vec::new();
        self.collect_paths(max, &mut Vec::new(), &mut paths);
        paths
    }

    fn collect_paths(&self, max: usize, prefix: &mut Vec<PathElement>, paths: &mut Vec<Path>) {
        for (element, node) in &self.0 {
            if paths.len() >= max {
                return;
            }
            prefix.push(element.clone());
            if node.member {
                paths.push(Path(prefix.clone()));
            }
            node.children.collect_paths(max, prefix, paths);
            prefix.pop();
        }
    }

    /// Builds a set from the nodes that `keep` returns. Empty nodes are left out.
    fn combine(&self, keep: impl Fn(&PathElement, &Node) -> Option<Node>) -> FieldSet {
        let nodes = self.0.iter().filter_map(|(element, node)| {
            let node = keep(element, node)?;
            (node.member || !node.children.is_empty()).then(|| (element.clone(), node))
        });
        FieldSet(nodes.collect())
    }

    /// The set as `fieldsV1`.
    pub fn to_json(&self) -> Value {
        Value::Object(self.to_object())
    }

    fn to_object(&self) -> Map<String, Value> {
        let mut object = Map::new();
        for (element, node) in &self.0 {
            let mut below = Map::new();
            if node.member && !node.children.is_empty() {
                below.insert(".".to_owned(), Value::Object(Map::new()));
            }
            below.extend(node.children.to_object());
            object.insert(element.encode(), Value::Object(below));
        }
        object
    }

    /// Reads `fieldsV1`.
    ///
    /// # Errors
    /// A level that is not an object, or an invalid key.
    pub fn from_json(fields: &Value) -> Result<FieldSet, InvalidFields> {
        FieldSet::read(fields, &mut Vec::new()).map(|(set, _)| set)
    }

    /// Reads one level. The flag is true if the level itself is a member: it has a `.`, or is empty.
    fn read(fields: &Value, path: &mut Vec<PathElement>) -> Result<(FieldSet, bool), InvalidFields> {
        let object = fields.as_object().ok_or_else(|| InvalidFields::NotAnObject(Path(path.clone())))?;
        let mut set = FieldSet::default();
        for (key, below) in object {
            if key == "." {
                continue;
            }
            let element = PathElement::parse(key).ok_or_else(|| InvalidFields::Key(key.clone()))?;
            path.push(element.clone());
            let (children, member) = FieldSet::read(below, path)?;
            path.pop();
            set.0.insert(element, Node { member, children });
        }
        Ok((set, object.contains_key(".") || object.is_empty()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn set(fields: &Value) -> FieldSet {
        FieldSet::from_json(fields).unwrap()
    }

    #[test]
    fn fields_v1_survives_reading_and_writing() {
        let fields = json!({
            "f:metadata": {"f:labels": {".": {}, "f:app": {}}},
            "f:spec": {"f:containers": {"k:{\"name\":\"a\"}": {".": {}, "f:image": {}}}},
        });
        assert_eq!(set(&fields).to_json(), fields);
        assert!(FieldSet::default().to_json().as_object().unwrap().is_empty());
    }

    #[test]
    fn invalid_fields_v1_is_refused() {
        assert_eq!(
            FieldSet::from_json(&json!({"f:a": 1})),
            Err(InvalidFields::NotAnObject(Path(vec![PathElement::field("a")])))
        );
        assert_eq!(FieldSet::from_json(&json!({"a": {}})), Err(InvalidFields::Key("a".into())));
    }

    #[test]
    fn a_difference_keeps_the_paths_below_a_removed_path() {
        let all = set(&json!({"f:a": {".": {}, "f:b": {}}, "f:c": {}}));
        let some = set(&json!({"f:a": {}}));
        assert_eq!(all.difference(&some).to_json(), json!({"f:a": {"f:b": {}}, "f:c": {}}));
        assert_eq!(all.without_trees(&some).to_json(), json!({"f:c": {}}));
        assert_eq!(all.difference(&all), FieldSet::default());
    }

    #[test]
    fn an_intersection_has_only_common_members() {
        let one = set(&json!({"f:a": {".": {}, "f:b": {}}, "f:c": {}}));
        let other = set(&json!({"f:a": {"f:b": {}, "f:x": {}}, "f:d": {}}));
        assert_eq!(one.intersection(&other).to_json(), json!({"f:a": {"f:b": {}}}));
        assert_eq!(
            one.clone().union(&other).to_json(),
            json!({"f:a": {".": {}, "f:b": {}, "f:x": {}}, "f:c": {}, "f:d": {}})
        );
    }
}
