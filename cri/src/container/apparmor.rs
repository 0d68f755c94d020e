//! The default AppArmor profile: its rules, and how it is loaded into the kernel.
//!
//! The rules follow the default profiles of other runtimes, so that their workloads run here. A container may do everything
//! except mount, write to kernel files, and interact with processes of other profiles.

use std::io;
use std::path::Path;
use std::process::Stdio;

use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::sync::Mutex;
use tracing::{info, warn};

use super::confinement::{Modules, OWN_PROFILE};

/// Programs that compile and load profiles.
const PARSERS: [&str; 2] = ["/sbin/apparmor_parser", "/usr/sbin/apparmor_parser"];
/// Directory of the parser's include files.
const MACROS: &str = "/etc/apparmor.d";

/// The include files that exist.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Macros {
    abi: bool,
    tunables: bool,
    base: bool,
}

/// The default profile of this machine, loaded at its first use.
#[derive(Debug, Default)]
pub(crate) struct DefaultProfile {
    /// Held during a load. True after the warning about a missing parser.
    warned: Mutex<bool>,
}

// === impl Macros ===

impl Macros {
    fn detect() -> Self {
        let exists = |name: &str| Path::new(MACROS).join(name).exists();
        Self {
            abi: exists("abi/3.0"),
            tunables: exists("tunables/global"),
            base: exists("abstractions/base"),
        }
    }
}

// === impl DefaultProfile ===

impl DefaultProfile {
    /// Loads the profile if the kernel has AppArmor and the profile is not loaded. Without a parser this logs a warning once,
    /// and containers get the profile that [`super::confinement`] chooses.
    ///
    /// # Errors
    /// If the parser fails.
    pub(crate) async fn ensure(&self) -> io::Result<()> {
        let mut warned = self.warned.lock().await;
        let Some(loaded) = Modules::detect().apparmor else { return Ok(()) };
        if loaded.iter().any(|name| name == OWN_PROFILE) {
            return Ok(());
        }
        let Some(parser) = parser() else {
            if !*warned {
                warn!(
                    "there is no apparmor_parser: the default AppArmor profile {OWN_PROFILE} cannot be loaded"
                );
            }
            *warned = true;
            return Ok(());
        };
        load(parser, &profile(Macros::detect(), &own_label())).await?;
        info!(profile = OWN_PROFILE, "loaded the default AppArmor profile");
        Ok(())
    }
}

/// The state of AppArmor, for the runtime's status.
pub(crate) fn describe() -> &'static str {
    match Modules::detect().apparmor {
        None => "off",
        Some(loaded) if loaded.iter().any(|name| name == OWN_PROFILE) => "on, coracle-default is loaded",
        Some(_) if parser().is_some() => "on, coracle-default is loaded when it is needed",
        Some(_) => "on, but there is no apparmor_parser to load coracle-default",
    }
}

fn parser() -> Option<&'static str> {
    PARSERS.into_iter().find(|path| Path::new(path).exists())
}

async fn load(parser: &str, text: &str) -> io::Result<()> {
    let mut command = Command::new(parser);
    // From standard input. The cache is skipped: it recognises changes only by the time of the file.
    command.args(["--replace", "--skip-cache"]).kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    coracle_open_files::limit(command.as_std_mut());
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(text.as_bytes()).await?;
    }
    let output = child.wait_with_output().await?;
    if output.status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(io::Error::other(format!("{parser} ended with {}: {errors}", output.status)))
}

/// The AppArmor profile of this process.
fn own_label() -> String {
    let label = std::fs::read_to_string("/proc/self/attr/current").unwrap_or_default();
    let name = label.trim().split(" (").next().unwrap_or_default();
    if name.is_empty() { "unconfined".to_owned() } else { name.to_owned() }
}

/// The profile's text. Signals from `runtime`, the label of this process, are allowed.
fn profile(macros: Macros, runtime: &str) -> String {
    let abi = if macros.abi { "abi <abi/3.0>,\n" } else { "" };
    let tunables = if macros.tunables { "include <tunables/global>\n" } else { "@{PROC}=/proc/\n" };
    let base = if macros.base { "  include <abstractions/base>\n" } else { "" };
    let peers: String = if runtime == "unconfined" {
        String::new()
    } else {
        format!("  signal (receive) peer=\"{runtime}\",\n")
    };
    format!(
        "{abi}{tunables}
profile {OWN_PROFILE} flags=(attach_disconnected,mediate_deleted) {{
{base}
  network,
  capability,
  file,
  umount,
  deny mount,

    # The processes that stop containers, and the container's own processes.
  signal (receive) peer=unconfined,
{peers}  signal (send,receive) peer={OWN_PROFILE},
  ptrace (trace,tracedby,read,readby) peer={OWN_PROFILE},
{RULES}}}
"
    )
}

/// Kernel files that containers may not write.
const RULES: &str = "
    # /proc: all except the directories of processes and the limits of shared memory.
  deny @{PROC}/* w,
  deny @{PROC}/[^0-9s/]*/** w,
  deny @{PROC}/s[^ey/]*/** w,
  deny @{PROC}/sy[^s/]*/** w,
  deny @{PROC}/sys[^/]*/** w,
  deny @{PROC}/sys/[^k/]** w,
  deny @{PROC}/sys/kernel/[^s/]** w,
  deny @{PROC}/sys/kernel/s[^h/]** w,
  deny @{PROC}/sys/kernel/sh[^m/]** w,
  deny @{PROC}/sysrq-trigger rwklx,
  deny @{PROC}/kcore rwklx,

    # /sys: all except cgroups.
  deny /sys/[^f/]*/** wklx,
  deny /sys/f[^s/]*/** wklx,
  deny /sys/fs/[^c/]*/** wklx,
  deny /sys/fs/c[^g/]*/** wklx,
  deny /sys/fs/cg[^r/]*/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/devices/virtual/powercap/** rwklx,
  deny /sys/kernel/security/** rwklx,
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_includes_the_existing_files() {
        let bare = profile(Macros::default(), "unconfined");
        assert!(bare.starts_with("@{PROC}=/proc/\n\nprofile coracle-default "), "{bare}");
        assert!(!bare.contains("include") && !bare.contains("abi <") && !bare.contains('"'));
        let whole = profile(Macros { abi: true, tunables: true, base: true }, "my runtime");
        assert!(whole.starts_with("abi <abi/3.0>,\ninclude <tunables/global>\n"));
        assert!(whole.contains("  include <abstractions/base>\n"));
        assert!(whole.contains("signal (receive) peer=\"my runtime\",\n"));
        for text in [bare, whole] {
            assert!(text.contains("\n  deny mount,\n") && text.ends_with("rwklx,\n}\n"));
        }
    }
}
