//! Field ownership: two plugins that set the same field of a container conflict, unless the later plugin has removed
//! the value first.

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
}

// === impl Owners ===

impl Owners {
    /// Claims of `plugin` on the container `id`.
    pub fn claims<'a>(&'a mut self, id: &str, plugin: &'a str) -> Claims<'a> {
        Claims { owners: self.plugins.owners.entry(id.to_owned()).or_default(), plugin }
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
        self.owners.simple.insert(key, self.plugin.to_owned());
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
        entries.owners.insert(entry.to_owned(), self.plugin.to_owned());
        Ok(())
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
