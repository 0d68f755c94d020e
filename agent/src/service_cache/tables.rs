//! Services by namespace and name. Pure.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;

/// All services.
#[derive(Default)]
pub(super) struct Tables {
    namespaces: HashMap<String, BTreeMap<String, Arc<Service>>>,
}

impl Tables {
    pub(super) fn of(&self, namespace: &str) -> Vec<Arc<Service>> {
        self.namespaces.get(namespace).into_iter().flat_map(BTreeMap::values).cloned().collect()
    }

    pub(super) fn get(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        self.namespaces.get(namespace)?.get(name).cloned()
    }

    pub(super) fn put(&mut self, service: Service) {
        let meta = &service.metadata;
        let (Some(namespace), Some(name)) = (meta.namespace.clone(), meta.name.clone()) else { return };
        self.namespaces.entry(namespace).or_default().insert(name, Arc::new(service));
    }

    pub(super) fn take(&mut self, service: &Service) {
        let meta = &service.metadata;
        let (Some(namespace), Some(name)) = (&meta.namespace, &meta.name) else { return };
        if let Some(services) = self.namespaces.get_mut(namespace) {
            services.remove(name);
            if services.is_empty() {
                self.namespaces.remove(namespace);
            }
        }
    }

    /// Namespaces whose services differ from `before`.
    pub(super) fn differing(&self, before: &Self) -> Vec<String> {
        let all = self.namespaces.keys().chain(before.namespaces.keys());
        let mut changed: Vec<String> =
            all.filter(|name| self.namespaces.get(*name) != before.namespaces.get(*name)).cloned().collect();
        changed.sort();
        changed.dedup();
        changed
    }
}
