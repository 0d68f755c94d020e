//! The kernel's keys: containers and execs do not inherit the session keyring of the runtime.

use std::ffi::CStr;
use std::fs;

use serde_json::json;

use crate::exec::{output, process};
use crate::fixture::Pod;

/// Description of a key. Only processes with the session keyring of this process can see the key.
const KEY: &CStr = c"coracle-test-key";

/// Gives this process a session keyring with a key, as the login session of an administrator has. Later threads and
/// processes inherit it.
#[allow(unsafe_code, reason = "keyctl and add_key have no safe wrapper")]
pub(crate) fn add_key_of_the_runtime() {
    const JOIN_SESSION_KEYRING: i32 = 1;
    const SET_PERMISSIONS: i32 = 5;
    const SESSION_KEYRING: i32 = -3;
    // Processes that possess the key have all permissions, others have none.
    const POSSESSOR: u32 = 0x3f00_0000;
    // SAFETY: without a name the kernel reads no memory of this process.
    unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, std::ptr::null::<u8>()) };
    let (kind, value) = (c"user", b"secret");
    // SAFETY: the strings and the value outlive the call.
    let key = unsafe {
        libc::syscall(
            libc::SYS_add_key,
            kind.as_ptr(),
            KEY.as_ptr(),
            value.as_ptr(),
            value.len(),
            SESSION_KEYRING,
        )
    };
    // SAFETY: takes numbers only. On a kernel without keys all calls fail.
    unsafe { libc::syscall(libc::SYS_keyctl, SET_PERMISSIONS, key, POSSESSOR) };
}

pub(crate) async fn a_container_has_no_key_of_the_runtime(mut pod: Pod) {
    let name = KEY.to_str().unwrap();
    match fs::read_to_string("/proc/keys") {
        Ok(own) => assert!(own.contains(name), "{own}"),
        Err(_) => coracle_testing::skip_part!("the kernel has no keys (CONFIG_KEYS)"),
    }
    pod.run("c", "cat /proc/keys; echo end").await;
    pod.exit("c", "").await;
    let output = pod.output("c", "stdout");
    assert_eq!(output.last().map(String::as_str), Some("end"));
    assert!(!output.iter().any(|line| line.contains(name)), "{output:?}");
    pod.end().await;
}

pub(crate) async fn each_exec_has_a_keyring_of_its_own(mut pod: Pod) {
    if fs::metadata("/proc/keys").is_err() {
        coracle_testing::skip_part!("the kernel has no keys (CONFIG_KEYS)");
        return pod.end().await;
    }
    pod.run("c", "sleep 1000").await;
    let mut found = Vec::new();
    for id in ["first", "second"] {
        let mut read = process(&["cat", "/proc/keys"]);
        // Keyrings belong to root. Another user sees only the keyring that its process has.
        read["user"] = json!({ "uid": 1000, "gid": 1000 });
        let (code, keys) = output(&mut pod, id, read).await;
        let own: Vec<String> = keys.lines().filter(|line| line.contains(" _ses: ")).map(serial).collect();
        assert_eq!((code, own.len()), (0, 1), "{keys}");
        found.extend(own);
    }
    assert_ne!(found[0], found[1], "two execs have the same session keyring");
    pod.end().await;
}

/// The number of a key, the first column of `/proc/keys`.
fn serial(line: &str) -> String {
    line.split(' ').next().unwrap_or_default().to_owned()
}
