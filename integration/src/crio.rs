//! Settings of CRI-O in tests. `scripts/crio` builds it.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

/// The settings of CRI-O that differ between tests.
pub struct CrioSettings<'a> {
    /// Directory of images, of the socket `crio.sock` and of the CNI lists in `net.d`.
    pub dir: &'a Path,
    /// Directory of the state that a boot removes.
    pub run: &'a Path,
    /// Directory of the CNI plugins.
    pub plugins: &'a Path,
    /// Image of sandboxes.
    pub sandbox_image: &'a str,
}

// === impl CrioSettings ===

impl CrioSettings<'_> {
    /// Writes the configuration files below the directory. Returns CRI-O's command line with them: the path of the
    /// program and its arguments.
    ///
    /// # Panics
    /// When CRI-O is not built, or when a file cannot be written.
    #[must_use]
    pub fn write(&self) -> Vec<String> {
        let tools = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools/crio"));
        let program = tools.join("crio");
        assert!(program.exists(), "run scripts/crio");
        let (configuration, none) = (self.dir.join("crio.conf"), self.dir.join("none"));
        let policy = json!({"default": [{"type": "insecureAcceptAnything"}]}).to_string();
        fs::write(self.dir.join("policy.json"), policy).unwrap();
        fs::write(&configuration, self.text(&tools)).unwrap();
        fs::create_dir_all(&none).unwrap();
        let [program, configuration, none] =
            [program, configuration, none].map(|path| path.into_os_string().into_string().unwrap());
        let flags = ["--config", &configuration, "--config-dir", &none, "--log-level", "info"];
        std::iter::once(program).chain(flags.map(str::to_owned)).collect()
    }

    /// The configuration. It sets every path that is configurable.
    fn text(&self, tools: &Path) -> String {
        format!(
            "[crio]\nroot = '{root}'\nrunroot = '{run}/storage'\nstorage_driver = 'overlay'\nlog_dir = '{run}/logs'\n\
             version_file = '{run}/version'\nversion_file_persist = '{root}.version'\n\
             clean_shutdown_file = '{root}.clean'\n[crio.api]\nlisten = '{socket}'\n\
             [crio.runtime]\ncgroup_manager = 'cgroupfs'\nconmon_cgroup = 'pod'\ndefault_runtime = 'runc'\n\
             pinns_path = '{pinns}'\nnamespaces_dir = '{run}/ns'\nhooks_dir = []\n\
             container_exits_dir = '{run}/exits'\ncontainer_attach_socket_dir = '{run}/attach'\n\
             [crio.runtime.runtimes.runc]\nruntime_path = '/usr/sbin/runc'\nruntime_root = '{run}/runc'\n\
             monitor_path = '/usr/bin/conmon'\nmonitor_cgroup = 'pod'\n\
             [crio.image]\npause_image = '{image}'\nsignature_policy = '{policy}'\n\
             [crio.network]\nnetwork_dir = '{lists}'\nplugin_dirs = ['{plugins}']\n",
            root = self.dir.join("crio").display(),
            run = self.run.display(),
            socket = self.dir.join("crio.sock").display(),
            pinns = tools.join("pinns").display(),
            image = self.sandbox_image,
            policy = self.dir.join("policy.json").display(),
            lists = self.dir.join("net.d").display(),
            plugins = self.plugins.display(),
        )
    }
}
