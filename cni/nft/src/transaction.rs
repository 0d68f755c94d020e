//! A transaction on one table: the table itself, its chains, sets, elements and rules.

use std::time::Duration;

use crate::data::DataType;
use crate::element::Element;
use crate::expression::{AnonymousMap, Hook, Part, Rule};
use crate::message::{Attributes, Batch, INET, Verb};

/// `NFT_DATA_VERDICT`.
const VERDICT: u32 = 0xffff_ff00;

/// Minimum bytes of a list of elements that is sent as one message, except for the last list. Even with one more
/// element, the list is far below the maximum size of an attribute.
const LONG_LIST: usize = 32 << 10;

/// A chain that is attached to a hook.
#[derive(Debug, Clone, Copy)]
pub struct BaseChain<'a> {
    /// Name of the chain.
    pub name: &'a str,
    /// The hook.
    pub hook: Hook,
    /// Order among the chains of the hook, ascending.
    pub priority: i32,
    /// `nat` or `filter`.
    pub kind: &'a str,
}

/// Description of a named set or map.
#[derive(Debug, Clone, Copy, Default)]
pub struct SetSpec<'a> {
    /// Name of the set.
    pub name: &'a str,
    /// Type of the keys.
    pub key: DataType,
    /// Type of the values. `None` means a set.
    pub value: Option<DataType>,
    /// Whether the values are verdicts.
    pub verdicts: bool,
    /// Whether the elements are the ends of intervals.
    pub intervals: bool,
    /// For a set to which rules add elements: the time after which the kernel removes an element, and the maximum
    /// number of elements.
    pub dynamic: Option<(Duration, u32)>,
    /// For a set to which rules add elements that count connections: the maximum number of elements. The kernel removes
    /// an element without connections.
    pub counted: Option<u32>,
}

/// Changes of one table, which the kernel applies completely or not at all.
#[derive(Debug)]
pub struct Transaction<'a> {
    family: u8,
    table: &'a str,
    batch: Batch,
    /// Number of maps and sets that the transaction has made. It is also the ID of the last map or set within the
    /// transaction.
    sets: u32,
}

// === impl Transaction ===

impl<'a> Transaction<'a> {
    /// An empty transaction on a table of the family `inet`.
    #[must_use]
    pub fn new(table: &'a str) -> Self {
        Self::of_family(INET, table)
    }

    /// An empty transaction on a table of this family.
    #[must_use]
    pub fn of_family(family: u8, table: &'a str) -> Self {
        Self { family, table, batch: Batch::new(), sets: 0 }
    }

    /// The messages of the transaction.
    #[must_use]
    pub fn finish(self) -> Batch {
        self.batch
    }

    fn named(&self) -> Attributes {
        Attributes::default().text(1, self.table)
    }

    /// Makes the table, unless it exists.
    pub fn make_table(&mut self) {
        let named = self.named();
        self.batch.push(self.family, Verb::NewTable, &named);
    }

    /// Deletes the table if it exists. The kernel refuses to delete an absent table, so the transaction first makes the
    /// table. Making an existing table is not an error.
    pub fn delete_table(&mut self) {
        self.make_table();
        let named = self.named();
        self.batch.push(self.family, Verb::DeleteTable, &named);
    }

    /// Makes a chain, unless it exists.
    pub fn make_chain(&mut self, name: &str) {
        let chain = self.named().text(3, name);
        self.batch.push(self.family, Verb::NewChain, &chain);
    }

    /// Makes a base chain, unless it exists.
    pub fn make_base_chain(&mut self, chain: BaseChain<'_>) {
        let hook = Attributes::default().number(1, chain.hook as u32).bytes(2, &chain.priority.to_be_bytes());
        let chain = self.named().text(3, chain.name).nest(4, hook).text(7, chain.kind);
        self.batch.push(self.family, Verb::NewChain, &chain);
    }

    /// Removes all rules of a chain.
    pub fn flush_chain(&mut self, name: &str) {
        let chain = self.named().text(2, name);
        self.batch.push(self.family, Verb::DeleteRule, &chain);
    }

    /// Removes a chain. The kernel refuses to remove a chain with rules or references.
    pub fn delete_chain(&mut self, name: &str) {
        let chain = self.named().text(3, name);
        self.batch.push(self.family, Verb::DeleteChain, &chain);
    }

    /// Makes a set or map, unless it exists.
    pub fn make_set(&mut self, spec: &SetSpec<'_>) {
        const INTERVAL: u32 = 0x4;
        const MAP: u32 = 0x8;
        const TIMEOUT: u32 = 0x10;
        const EVAL: u32 = 0x20;
        let is_map = spec.value.is_some() || spec.verdicts;
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let flags = flag(spec.intervals, INTERVAL)
            | flag(is_map, MAP)
            | flag(spec.dynamic.is_some(), TIMEOUT | EVAL)
            | flag(spec.counted.is_some(), EVAL);
        let mut set = self.named().text(2, spec.name).number(3, flags);
        set = set.number(4, spec.key.kind).number(5, spec.key.length);
        if let Some(value) = spec.value {
            set = set.number(6, value.kind).number(7, value.length);
        } else if spec.verdicts {
            set = set.number(6, VERDICT);
        }
        if let Some((timeout, size)) = spec.dynamic {
            let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
            set = set.nest(9, Attributes::default().number(1, size)).bytes(11, &millis.to_be_bytes());
        }
        if let Some(size) = spec.counted {
            set = set.nest(9, Attributes::default().number(1, size));
        }
        self.sets += 1;
        self.batch.push(self.family, Verb::NewSet, &set.number(10, self.sets));
    }

    /// Removes a set. The kernel refuses to remove a set with references.
    pub fn delete_set(&mut self, name: &str) {
        let set = self.named().text(2, name);
        self.batch.push(self.family, Verb::DeleteSet, &set);
    }

    /// Adds elements to a set.
    pub fn add<'e>(&mut self, set: &str, elements: impl IntoIterator<Item = &'e Element>) {
        let named = self.named().text(2, set);
        self.push_elements(Verb::NewElements, &named, elements.into_iter(), |list, element| {
            element.append_to(list)
        });
    }

    /// Removes elements of a set. An absent element is an error.
    pub fn remove<'e>(&mut self, set: &str, elements: impl IntoIterator<Item = &'e Element>) {
        let named = self.named().text(2, set);
        self.push_elements(Verb::DeleteElements, &named, elements.into_iter(), |list, element| {
            element.append_to(list)
        });
    }

    /// Adds or deletes encoded elements, in as many messages as necessary.
    pub fn elements(&mut self, verb: Verb, set: &str, elements: impl Iterator<Item = Attributes>) {
        let named = self.named().text(2, set);
        self.push_elements(verb, &named, elements, |list, element| list.and(&element));
    }

    fn push_elements<E>(
        &mut self,
        verb: Verb,
        set: &Attributes,
        elements: impl Iterator<Item = E>,
        append: impl Fn(Attributes, E) -> Attributes,
    ) {
        let mut list = Attributes::default();
        let mut elements = elements.peekable();
        while let Some(element) = elements.next() {
            list = append(list, element);
            if list.len() >= LONG_LIST || elements.peek().is_none() {
                let message = set.clone().nest(3, std::mem::take(&mut list));
                self.batch.push(self.family, verb, &message);
            }
        }
    }

    /// Appends a rule to a chain.
    pub fn rule(&mut self, chain: &str, rule: &Rule) {
        let mut expressions = Attributes::default();
        for part in &rule.0 {
            let expression = match part {
                Part::Expression(expression) => expression.clone(),
                Part::Anonymous { set, into } => self.anonymous(set, *into),
            };
            expressions = expressions.nest(1, expression);
        }
        let rule = self.named().text(2, chain).nest(4, expressions);
        self.batch.push(self.family, Verb::NewRule, &rule);
    }

    /// Makes an anonymous set. Returns the expression that looks up a key in the set.
    fn anonymous(&mut self, set: &AnonymousMap, into: Option<u32>) -> Attributes {
        const ANONYMOUS: u32 = 0x1;
        const CONSTANT: u32 = 0x2;
        const MAP: u32 = 0x8;
        self.sets += 1;
        let (id, is_map) = (self.sets, into.is_some());
        let name = if is_map { "__map%d" } else { "__set%d" };
        let flags = ANONYMOUS | CONSTANT | if is_map { MAP } else { 0 };
        let mut made = self.named().text(2, name).number(3, flags);
        made = made.number(4, set.key.kind).number(5, set.key.length);
        made = match set.value {
            Some(value) => made.number(6, value.kind).number(7, value.length),
            None if is_map => made.number(6, VERDICT),
            None => made,
        };
        let size = u32::try_from(set.elements.len()).unwrap_or(u32::MAX);
        made = made.nest(9, Attributes::default().number(1, size));
        self.batch.push(self.family, Verb::NewSet, &made.number(10, id));
        let named = self.named().text(2, name).number(4, id);
        let elements = set.elements.iter();
        self.push_elements(Verb::NewElements, &named, elements, |list, element| element.append_to(list));
        let lookup = Attributes::default().text(1, name).number(2, crate::R0);
        let lookup = match into {
            Some(register) => lookup.number(3, register),
            None => lookup,
        };
        Attributes::default().text(1, "lookup").nest(2, lookup.number(4, id))
    }
}
