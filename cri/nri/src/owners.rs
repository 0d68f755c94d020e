//! Field ownership: two plugins that set the same field of a container conflict, unless the later plugin has removed
//! the value first.

use std::collections::BTreeMap;

use coracle_proto::nri::{Field, FieldOwners, OwningPlugins};

use crate::mark::{mark, unmark};

/// Two plugins set the same field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("plugins {plugin:?} and {other:?} both tried to set {what}")]
pub struct Conflict {
    /// The later plugin.
    pub plugin: String,
    /// The earlier plugin.
    pub other: String,
    /// The field, and the entry if the field has several entries.
    pub what: String,
}

/// The owners of all adjusted fields of all containers of one request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Owners {
    /// The owners in the form that validating plugins get.
    pub plugins: OwningPlugins,
}

/// Claims of one plugin on one container.
#[derive(Debug)]
pub struct Claims<'a> {
    owners: &'a mut FieldOwners,
    plugin: &'a str,
    made: Vec<Claim>,
}

/// A claim of a field, or of an entry of a field.
#[derive(Debug)]
struct Claim {
    field: i32,
    entry: Option<String>,
    /// The former owner: this plugin, if it has removed the value. Otherwise `None`.
    former: Option<String>,
}

// === impl Owners ===

impl Owners {
    /// Claims of `plugin` on the container `id`.
    pub fn claims<'a>(&'a mut self, id: &str, plugin: &'a str) -> Claims<'a> {
        let owners = self.plugins.owners.entry(id.to_owned()).or_default();
        Claims { owners, plugin, made: Vec::new() }
    }
}

// === impl Claims ===

impl Claims<'_> {
    /// Claims a field with one value.
    ///
    /// # Errors
    /// If another plugin owns it.
    pub fn set(&mut self, field: Field) -> Result<(), Conflict> {
        let key = i32::from(field);
        self.check(self.owners.simple.get(&key), || name(field).to_owned())?;
        let former = self.owners.simple.insert(key, self.plugin.to_owned());
        self.made.push(Claim { field: key, entry: None, former });
        Ok(())
    }

    /// Claims an entry of a field with several entries.
    ///
    /// # Errors
    /// If another plugin owns it.
    pub fn set_entry(&mut self, field: Field, entry: &str) -> Result<(), Conflict> {
        let key = i32::from(field);
        let owner = self.owners.compound.get(&key).and_then(|entries| entries.owners.get(entry));
        self.check(owner, || format!("{} {entry}", name(field)))?;
        let entries = self.owners.compound.entry(key).or_default();
        let former = entries.owners.insert(entry.to_owned(), self.plugin.to_owned());
        self.made.push(Claim { field: key, entry: Some(entry.to_owned()), former });
        Ok(())
    }

    /// Undoes the claims of fields and entries in reverse order.
    pub(crate) fn undo(self) {
        let Self { owners, made, .. } = self;
        for Claim { field, entry, former } in made.into_iter().rev() {
            match entry {
                None => restore(&mut owners.simple, field, former),
                Some(entry) => {
                    let entries = owners.compound.entry(field).or_default();
                    restore(&mut entries.owners, entry, former);
                }
            }
        }
    }

    /// Records that the plugin removed the value. Only this plugin may set it again.
    pub fn clear(&mut self, field: Field) {
        self.owners.simple.insert(field.into(), mark(self.plugin));
    }

    /// Records that the plugin removed the entry.
    pub fn clear_entry(&mut self, field: Field, entry: &str) {
        let entries = self.owners.compound.entry(field.into()).or_default();
        entries.owners.insert(entry.to_owned(), mark(self.plugin));
    }

    /// Adds the plugin to the owners of an accumulating field.
    pub fn join(&mut self, field: Field) {
        let owners = self.owners.simple.entry(field.into()).or_default();
        if !owners.is_empty() {
            owners.push(',');
        }
        owners.push_str(self.plugin);
    }

    fn check(&self, owner: Option<&String>, what: impl FnOnce() -> String) -> Result<(), Conflict> {
        let Some(owner) = owner else { return Ok(()) };
        let (other, cleared) = unmark(owner);
        if cleared && other == self.plugin {
            return Ok(());
        }
        Err(Conflict { plugin: self.plugin.to_owned(), other: other.to_owned(), what: what() })
    }
}

fn name(field: Field) -> &'static str {
    field.as_str_name()
}

/// Sets a key to its former value, or removes it if there was none.
fn restore<K: Ord>(values: &mut BTreeMap<K, String>, key: K, former: Option<String>) {
    match former {
        Some(former) => values.insert(key, former),
        None => values.remove(&key),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_plugin_owns_a_field_unless_the_second_removed_it() {
        let mut owners = Owners::default();
        owners.claims("c", "10-a").set(Field::MemLimit).expect("free");
        let conflict = owners.claims("c", "20-b").set(Field::MemLimit).expect_err("taken");
        assert_eq!(conflict.to_string(), "plugins \"20-b\" and \"10-a\" both tried to set MemLimit");
        owners.claims("c", "20-b").clear(Field::MemLimit);
        owners.claims("c", "20-b").set(Field::MemLimit).expect("cleared");
        owners.claims("d", "20-b").set(Field::MemLimit).expect("another container");
    }

    #[test]
    fn claims_that_are_taken_back_leave_the_former_owners() {
        let mut owners = Owners::default();
        owners.claims("c", "10-a").set(Field::CpuQuota).expect("free");
        owners.claims("c", "20-b").clear(Field::MemLimit);
        let before = owners.plugins.owners["c"].simple.clone();
        let mut claims = owners.claims("c", "20-b");
        claims.set(Field::MemLimit).expect("cleared");
        claims.set(Field::PidsLimit).expect("free");
        claims.set_entry(Field::Env, "X").expect("free");
        claims.set(Field::CpuQuota).expect_err("taken");
        claims.undo();
        assert_eq!(owners.plugins.owners["c"].simple, before);
        owners.claims("c", "30-c").set_entry(Field::Env, "X").expect("free again");
    }

    #[test]
    fn entries_have_single_owners_and_hooks_are_shared() {
        let mut owners = Owners::default();
        owners.claims("c", "a").set_entry(Field::Env, "X").expect("free");
        owners.claims("c", "b").set_entry(Field::Env, "Y").expect("free");
        assert!(owners.claims("c", "b").set_entry(Field::Env, "X").is_err());
        owners.claims("c", "a").join(Field::OciHooks);
        owners.claims("c", "b").join(Field::OciHooks);
        assert_eq!(owners.plugins.owners["c"].simple[&Field::OciHooks.into()], "a,b");
    }
}
