//! What several plugins ask of one container, merged: in the order of their indices, each seeing the
//! container as those before left it, and no two setting the same field. Pure.

mod fields;
mod resources;

use coracle_proto::nri::{
    Container, ContainerAdjustment, ContainerEviction, ContainerUpdate, CreateContainerResponse, Field,
    LinuxContainerAdjustment, LinuxResources,
};

use crate::owners::{Claims, Conflict, Owners};

/// Why what a plugin asks for cannot be merged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// Another plugin asked for it.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// A container that does not exist yet cannot be updated.
    #[error("plugin {plugin:?} asked for an update of {id} while that is being created")]
    UpdatesItself {
        /// Who asked.
        plugin: String,
        /// The container.
        id: String,
    },
}

/// The creation of one container.
#[derive(Debug, Clone, Default)]
pub struct Creation {
    /// The container as the next plugin sees it.
    pub container: Container,
    /// What all asked for so far.
    pub adjustment: ContainerAdjustment,
    /// What they ask of other containers.
    pub updates: Updates,
    /// Which containers they want stopped.
    pub evictions: Vec<ContainerEviction>,
    /// Who asked for what.
    pub owners: Owners,
}

/// Updates of containers that exist, one each.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Updates {
    /// In the order in which they were first asked for.
    pub list: Vec<ContainerUpdate>,
}

/// The update of one container, which plugins may change before it is made.
#[derive(Debug, Clone, Default)]
pub struct Change {
    id: String,
    /// The limits as the next plugin sees them.
    pub resources: LinuxResources,
    /// Whether any plugin changed them.
    pub changed: bool,
    /// What plugins ask of other containers.
    pub updates: Updates,
    /// Which containers they want stopped.
    pub evictions: Vec<ContainerEviction>,
    owners: Owners,
}

// === impl Creation ===

impl Creation {
    /// Before any plugin was asked.
    #[must_use]
    pub fn new(container: Container) -> Self {
        Self { container, ..Self::default() }
    }

    /// Merges one plugin's answer.
    ///
    /// # Errors
    /// When it contradicts an earlier one.
    pub fn merge(&mut self, plugin: &str, answer: CreateContainerResponse) -> Result<(), MergeError> {
        if let Some(adjustment) = answer.adjust {
            self.adjust(plugin, adjustment)?;
        }
        for update in answer.update {
            if update.container_id == self.container.id {
                let id = update.container_id;
                return Err(MergeError::UpdatesItself { plugin: plugin.to_owned(), id });
            }
            self.updates.merge(plugin, &update, &mut self.owners)?;
        }
        self.evictions.extend(answer.evict);
        Ok(())
    }

    fn adjust(&mut self, plugin: &str, asked: ContainerAdjustment) -> Result<(), Conflict> {
        let id = self.container.id.clone();
        let mut claims = self.owners.claims(&id, plugin);
        let (seen, all) = (&mut self.container, &mut self.adjustment);
        fields::annotations(&asked.annotations, &mut claims, seen, all)?;
        fields::mounts(asked.mounts, &mut claims, seen, all)?;
        fields::env(asked.env, &mut claims, seen, all)?;
        fields::args(asked.args, &mut claims, seen, all)?;
        if let Some(hooks) = asked.hooks {
            fields::hooks(&hooks, &mut claims, seen, all);
        }
        if let Some(linux) = asked.linux {
            adjust_linux(linux, &mut claims, seen, all)?;
        }
        for limit in asked.rlimits {
            claims.set_entry(Field::Rlimits, &limit.r#type)?;
            seen.rlimits.push(limit.clone());
            all.rlimits.push(limit);
        }
        for device in asked.cdi_devices {
            claims.set_entry(Field::CdiDevices, &device.name)?;
            all.cdi_devices.push(device);
        }
        Ok(())
    }
}

fn adjust_linux(
    asked: LinuxContainerAdjustment,
    claims: &mut Claims<'_>,
    seen: &mut Container,
    all: &mut ContainerAdjustment,
) -> Result<(), Conflict> {
    let seen = seen.linux.get_or_insert_default();
    let all = all.linux.get_or_insert_default();
    fields::devices(asked.devices, claims, seen, all)?;
    if let Some(resources) = &asked.resources {
        let mut targets = [seen.resources.get_or_insert_default(), all.resources.get_or_insert_default()];
        resources::merge(resources, claims, &mut targets)?;
        for target in targets {
            target.devices.extend(resources.devices.iter().cloned());
        }
    }
    if !asked.cgroups_path.is_empty() {
        claims.set(Field::CgroupsPath)?;
        seen.cgroups_path.clone_from(&asked.cgroups_path);
        all.cgroups_path = asked.cgroups_path;
    }
    fields::namespaces(asked.namespaces, claims, seen, all)?;
    fields::sysctls(&asked.sysctl, claims, seen, all)?;
    fields::net_devices(asked.net_devices, claims, seen, all)?;
    if let Some(rdt) = asked.rdt {
        fields::rdt(rdt, claims, all)?;
    }
    macro_rules! one_value {
        ($($name:ident is $field:ident),* $(,)?) => {$(
            if let Some(value) = asked.$name {
                claims.set(Field::$field)?;
                seen.$name = Some(value.clone());
                all.$name = Some(value);
            }
        )*};
    }
    one_value!(
        oom_score_adj is OomScoreAdj,
        io_priority is IoPriority,
        seccomp_policy is SeccompPolicy,
        scheduler is LinuxSched,
    );
    if let Some(policy) = asked.memory_policy {
        claims.set(Field::MemoryPolicy)?;
        all.memory_policy = Some(policy);
    }
    Ok(())
}

// === impl Updates ===

impl Updates {
    /// Merges one plugin's update of one container. One that may fail and contradicts an earlier one
    /// is left out whole.
    ///
    /// # Errors
    /// When it contradicts an earlier one.
    pub fn merge(
        &mut self,
        plugin: &str,
        update: &ContainerUpdate,
        owners: &mut Owners,
    ) -> Result<(), Conflict> {
        let id = &update.container_id;
        let at = self.list.iter().position(|known| known.container_id == *id);
        let mut merged = match at {
            Some(at) => self.list[at].clone(),
            None => ContainerUpdate {
                container_id: id.clone(),
                linux: None,
                ignore_failure: update.ignore_failure,
            },
        };
        merged.ignore_failure &= update.ignore_failure;
        if let Some(asked) = update.linux.as_ref().and_then(|linux| linux.resources.as_ref()) {
            let target = merged.linux.get_or_insert_default().resources.get_or_insert_default();
            // On a copy, since a claim that is refused in the middle must leave no other behind.
            let mut tried = owners.clone();
            match resources::merge(asked, &mut tried.claims(id, plugin), &mut [target]) {
                Ok(()) => *owners = tried,
                Err(_conflict) if update.ignore_failure => return Ok(()),
                Err(conflict) => return Err(conflict),
            }
        }
        match at {
            Some(at) => self.list[at] = merged,
            None => self.list.push(merged),
        }
        Ok(())
    }
}

// === impl Change ===

impl Change {
    /// Before any plugin was asked.
    #[must_use]
    pub fn new(id: &str, resources: LinuxResources) -> Self {
        Self { id: id.to_owned(), resources, ..Self::default() }
    }

    /// Merges one plugin's answer.
    ///
    /// # Errors
    /// When it contradicts an earlier one.
    pub fn merge(&mut self, plugin: &str, updates: &[ContainerUpdate]) -> Result<(), Conflict> {
        for update in updates {
            if update.container_id == self.id {
                self.merge_own(plugin, update)?;
            } else {
                self.updates.merge(plugin, update, &mut self.owners)?;
            }
        }
        Ok(())
    }

    fn merge_own(&mut self, plugin: &str, update: &ContainerUpdate) -> Result<(), Conflict> {
        let Some(asked) = update.linux.as_ref().and_then(|linux| linux.resources.as_ref()) else {
            return Ok(());
        };
        let (mut tried, mut owners) = (self.resources.clone(), self.owners.clone());
        match resources::merge(asked, &mut owners.claims(&self.id, plugin), &mut [&mut tried]) {
            Ok(()) => {
                (self.resources, self.owners, self.changed) = (tried, owners, true);
                Ok(())
            }
            Err(_conflict) if update.ignore_failure => Ok(()),
            Err(conflict) => Err(conflict),
        }
    }
}

#[cfg(test)]
mod tests;
