/* A function for GNU make, $(become COMMAND): COMMAND takes the place of make, with its process id.
 *
 * make answers SIGTERM by dying of it whatever its child returned, so a server that ends in order could not end
 * `make serve` with exit code 0. The Makefile loads this where make and the compiler allow it.
 */
#include <gnumake.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

int plugin_is_GPL_compatible; /* make refuses to load an object without this symbol; Apache-2.0 is. */

static char *become(const char *name, unsigned int argc, char **argv)
{
    (void)name, (void)argc;
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    fflush(NULL);
    execl("/bin/sh", "sh", "-c", argv[0], (char *)NULL);
    return NULL;
}

int become_gmk_setup(void)
{
    gmk_add_function("become", become, 1, 1, GMK_FUNC_DEFAULT);
    return 1;
}
