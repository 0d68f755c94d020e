//! Capabilities of a container: the usual fourteen, changed by the request, and limited to the capabilities of this
//! process. Both "privileged" and `ALL` mean all capabilities of this process. Pure.

use coracle_proto::cri::Capability;

/// Capabilities of a container without a request: the set of containerd and Docker.
const DEFAULT: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// A container's capability sets, as `CAP_…` names in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Sets {
    /// Bounding, permitted and effective.
    pub(super) kept: Vec<String>,
    /// Inheritable and ambient.
    pub(super) ambient: Vec<String>,
}

/// The capability sets for a request, limited to `ours`. An unknown name is an error.
pub(super) fn sets(request: Option<&Capability>, privileged: bool, ours: &[String]) -> Result<Sets, String> {
    if privileged {
        return Ok(Sets { kept: ours.to_vec(), ambient: Vec::new() });
    }
    let none = Capability::default();
    let request = request.unwrap_or(&none);
    let add = names(&request.add_capabilities)?;
    let drop = names(&request.drop_capabilities)?;
    let ambient = names(&request.add_ambient_capabilities)?;
    let all = |list: &[String]| list.iter().any(|name| name == "CAP_ALL");
    let mut kept: Vec<String> = if all(&add) {
        ours.to_vec()
    } else if all(&drop) {
        Vec::new()
    } else {
        DEFAULT.iter().map(|name| (*name).to_owned()).collect()
    };
    // A single name has precedence over `ALL` in the other list, as in containerd. So `ALL` is applied first, then the
    // names.
    kept.extend(add.into_iter().filter(|name| name != "CAP_ALL"));
    kept.extend(ambient.iter().cloned());
    kept.retain(|name| ours.contains(name) && !drop.contains(name));
    kept.sort_unstable();
    kept.dedup();
    let ambient = ambient.into_iter().filter(|name| kept.contains(name)).collect();
    Ok(Sets { kept, ambient })
}

fn names(list: &[String]) -> Result<Vec<String>, String> {
    list.iter().map(|name| canonical(name)).collect()
}

/// Normalises a name: `net_admin`, `NET_ADMIN` and `CAP_NET_ADMIN` are the same.
fn canonical(name: &str) -> Result<String, String> {
    let upper = name.to_ascii_uppercase();
    let full = if upper.starts_with("CAP_") { upper } else { format!("CAP_{upper}") };
    if full == "CAP_ALL" || full.parse::<caps::Capability>().is_ok() {
        return Ok(full);
    }
    Err(format!("unknown capability {name:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    fn kept(add: &[&str], drop: &[&str]) -> Vec<String> {
        let mut ours = strings(&DEFAULT);
        ours.extend(strings(&["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]));
        let request = Capability {
            add_capabilities: strings(add),
            drop_capabilities: strings(drop),
            add_ambient_capabilities: Vec::new(),
        };
        sets(Some(&request), false, &ours).expect("known names").kept
    }

    #[test]
    fn requests_change_the_default_within_our_capabilities() {
        assert_eq!(kept(&[], &[]), strings(&DEFAULT));
        assert_eq!(kept(&[], &["ALL"]), strings(&[]));
        assert_eq!(kept(&["NET_BIND_SERVICE"], &["ALL"]), strings(&["CAP_NET_BIND_SERVICE"]));
        assert_eq!(kept(&["ALL"], &[]).len(), 16);
        assert!(!kept(&["ALL"], &["net_admin"]).contains(&"CAP_NET_ADMIN".to_owned()));
        assert!(kept(&["CAP_SYS_ADMIN"], &[]).contains(&"CAP_SYS_ADMIN".to_owned()));
        assert_eq!(kept(&["SYS_RESOURCE"], &[]), strings(&DEFAULT), "this process lacks the capability");
    }

    #[test]
    fn an_unknown_name_is_refused() {
        let request = Capability { add_capabilities: strings(&["NO_SUCH"]), ..Default::default() };
        assert!(sets(Some(&request), false, &[]).is_err());
    }
}
