//! Where network configurations and foreign plugins are (CNI).

use std::path::PathBuf;

/// Decided, with the defaults of every CNI runtime.
#[derive(Clone, Debug)]
pub(crate) struct Cni {
    pub(crate) conf_dir: Option<PathBuf>,
    pub(crate) bin_dirs: Vec<PathBuf>,
}

/// An empty directory of configurations means that there is none.
pub(super) fn decide(conf_dir: Option<String>, bin_dirs: Vec<PathBuf>) -> Cni {
    let conf_dir = conf_dir.unwrap_or_else(|| "/etc/cni/net.d".to_owned());
    Cni {
        conf_dir: Some(PathBuf::from(conf_dir)).filter(|dir| !dir.as_os_str().is_empty()),
        bin_dirs: if bin_dirs.is_empty() { vec!["/opt/cni/bin".into()] } else { bin_dirs },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_directory_is_none() {
        assert_eq!(decide(None, Vec::new()).conf_dir, Some("/etc/cni/net.d".into()));
        assert_eq!(decide(Some(String::new()), Vec::new()).conf_dir, None);
        assert_eq!(decide(None, vec!["/a".into(), "/b".into()]).bin_dirs.len(), 2);
    }
}
