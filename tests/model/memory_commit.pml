/* SPDX-License-Identifier: Apache-2.0
 *
 * How a state is committed in the memory of several machines, for spin, and what a later job takes from there: in every
 * order, ranks die, machines are lost, requests are refused, and holders free what goes with a rank that has died.
 *
 * Each machine has a holder, which keeps files, and one rank. A rank puts its file into its own holder and into those
 * of the R machines behind its own. When all have done so, the coordinator puts notes and mark of the save into its
 * holder, then each other rank into its own. When all have done that, the save is reported, and older ones are freed.
 *
 * A holder is asked for a mark with the names of the files that it must have, and refuses the mark without them. What
 * has a mark beside it stays; anything else goes with the connection of the rank that has put it, at any time after
 * that has ended. A job ends when one of its ranks dies: the others die as well, each whenever it is its turn.
 *
 * A new job begins when no rank is left; a lost machine is replaced by one with an empty holder. The job takes the
 * newest step that is whole. Each machine then frees all steps in its holder but that one, and the one that most
 * holders have a mark of. Names of steps are used again: the job takes the step before, and comes to the same step.
 *
 * test_memory_commit_model.py runs this file; docs/internals/architecture.md says what it shows.
 *
 *   M       machines, 2 to 4
 *   R       replicas of each file, less than M
 *   SAVES   2 to 4; save 0 was reported before all this
 *   JOBS    that follow the first one
 *   LOSSES  machines that may be lost, in all
 *   REFUSED requests that may be refused, in all (no memory left, say)
 *   DEATHS  0: nobody dies
 *   MOVES   0: the coordinator is always on machine 0; 1: in each job after the first one it is anywhere
 *   NEW_NAMES  1: no name of a step is used again
 *   SAFEST  1: a job takes the step that most holders have a mark of, which may be older, and frees all others
 *   DRAFT   1: the protocol as it was first written down: a holder takes a mark whatever it has, a job frees nothing
 *           when it begins, names are new. BOUND is not demanded. 2: and nothing is reported if a rank has died by
 *           then, as if outcomes were exchanged twice
 *   M_...   a mutation: the code as it must not be
 *
 * Left out: several ranks of a machine, of which one acts for all; parts of a step; states on a disk; a machine that
 * was believed lost and comes back; requests that a holder carries out after it noticed that their sender has died.
 */
#ifndef DRAFT
#define DRAFT 0
#endif
#if DRAFT
#define NEW_NAMES 1
#define M_NO_CLEAN_UP
#define M_NO_CHECK
#endif
#ifndef M
#define M 2
#endif
#ifndef R
#define R 1
#endif
#ifndef SAVES
#define SAVES 3
#endif
#ifndef JOBS
#define JOBS 2
#endif
#ifndef LOSSES
#define LOSSES R
#endif
#ifndef REFUSED
#define REFUSED 0
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef NEW_NAMES
#define NEW_NAMES 0
#endif
#ifndef MOVES
#define MOVES 1
#endif
#ifndef SAFEST
#define SAFEST 0
#endif
#define KEEP 1

#define BIT(n) (1 << (n))
#define HAS(set, n) (((set) >> (n)) & 1)
#define ALL ((1 << M) - 1)
#define NONE SAVES

/* Properties by number, so that a failure says which. */
#define MUST(property, x) assert((x) || (property) == 0)
#define NEWEST 1  /* while at most R machines were lost since: what was reported last is taken, or a newer one */
#define WHOLE 2   /* what is taken has all its files until they are read */
#define NO_MIX 3  /* beside a mark are its notes and the files of that save; no two saves of one name have marks */
#if DRAFT
#define BOUND 0
#else
#define BOUND 4   /* while a rank makes no save, its holder has files that stay of at most KEEP + 1 saves */
#endif
#define NO_WAIT 5 /* if nobody dies, each save ends on all ranks */

/* What a holder has of a save: the files of machines in the lower bits, and these. */
#define FILES 15
#define NOTES 16
#define MARK 32
#define STAYS 64 /* there was a mark: the files go with no rank any more */
byte has[M * SAVES];
#define AT(j, s) has[(j) * SAVES + (s)]

byte name[SAVES];     /* of the step, as a number */
byte save;            /* the one under way, or the last; NONE in a job that makes none */
byte first;           /* the machine of the coordinator */
byte alive;           /* ranks that have not died */
byte go;              /* ranks that are to begin: with the job if they have died, else with the save */
byte open;            /* ranks whose connections are open, and who need what they have put */
byte written;         /* ranks that have said so to the coordinator */
byte good;            /* ranks that have said to all that their mark is put */
byte bad;             /* ranks that have said to all that the save has failed */
byte over;            /* ranks for which the save is over, and who know how it ended */
byte lost;            /* machines that are lost and not yet replaced */
byte losses;
byte since;           /* machines lost since the newest save was reported, or before that in the same job */
byte refused;
byte reported;        /* the newest save that a rank has reported as committed */
byte jobs;
byte taken;
byte kept;            /* saves that the clean-up of this job keeps */
hidden byte x, y, n, most; /* only within steps that cannot be interrupted */

#if M == 2
#define COUNT(set) (HAS(set, 0) + HAS(set, 1))
#elif M == 3
#define COUNT(set) (HAS(set, 0) + HAS(set, 1) + HAS(set, 2))
#else
#define COUNT(set) (HAS(set, 0) + HAS(set, 1) + HAS(set, 2) + HAS(set, 3))
#endif

/* The files that a holder must have. */
#if R == 0 || defined(M_OWN_REPLICA)
#define EXPECTED(j) BIT(j)
#elif R == 1
#define EXPECTED(j) (BIT(j) | BIT(((j) + M - 1) % M))
#else
#define EXPECTED(j) (BIT(j) | BIT(((j) + M - 1) % M) | BIT(((j) + M - 2) % M))
#endif
#if defined(M_OWN_REPLICA) /* replicas are put on the sender's own machine */
#define PEER(r, d) (r)
#else
#define PEER(r, d) (((r) + (d)) % M)
#endif
#if defined(M_NO_CHECK) /* a holder takes a mark whatever it has */
#define MAY_MARK(j) true
#else
#define MAY_MARK(j) ((AT(j, save) & EXPECTED(j)) == EXPECTED(j))
#endif
/* What a holder must have beside a mark. */
#if defined(M_NO_CHECK)
#define IS_SOUND(v) (((v) & MARK) == 0 || ((v) & NOTES))
#else
#define IS_SOUND(v) (((v) & MARK) == 0 || (((v) & NOTES) && ((v) & EXPECTED(x)) == EXPECTED(x)))
#endif

#if defined(M_CLOSE_EARLY) /* connections end once all is written */
#define IS_WRITTEN written = written | BIT(r); open = open & ~BIT(r)
#else
#define IS_WRITTEN written = written | BIT(r)
#endif
#define DIES :: atomic { DEATHS && jobs < JOBS -> goto dies }
#define IS_REFUSED :: atomic { refused < REFUSED -> refused++; goto fails }
#define SOMEBODY_DIED (alive != ALL)
#if DRAFT == 2
#define HEARS_ALL (good == ALL && !SOMEBODY_DIED)
#else
#define HEARS_ALL (good == ALL)
#endif

/* --- A holder: frees what goes with a connection that has ended -------------------------------------------------- */

#define FREES(s, i)                                                                                             \
  :: d_step {                                                                                                   \
       (AT(j, s) & (BIT(i) | STAYS)) == BIT(i) && ((s) != save || !HAS(open, i)) -> AT(j, s) = AT(j, s) & ~BIT(i) \
     }
#if M == 2
#define FREES_ANY(s) FREES(s, 0) FREES(s, 1)
#elif M == 3
#define FREES_ANY(s) FREES(s, 0) FREES(s, 1) FREES(s, 2)
#else
#define FREES_ANY(s) FREES(s, 0) FREES(s, 1) FREES(s, 2) FREES(s, 3)
#endif

proctype Holder(byte j) {
end:
  do
  FREES_ANY(1)
#if SAVES > 2
  FREES_ANY(2)
#endif
#if SAVES > 3
  FREES_ANY(3)
#endif
  od
}

/* --- A rank ------------------------------------------------------------------------------------------------------ */

/* Frees the saves in `going` in the own holder, in two requests. */
inline free_marks() {
  d_step {
    x = 0;
    do
    :: x < SAVES ->
#if defined(M_FILES_FIRST)
       AT(r, x) = (HAS(going, x) -> AT(r, x) & (MARK | NOTES | STAYS) : AT(r, x));
#else
       AT(r, x) = (HAS(going, x) -> AT(r, x) & ~MARK : AT(r, x));
#endif
       x++
    :: else -> break
    od;
    x = 0
  }
}

inline free_files() {
  d_step {
    x = 0;
    do
    :: x < SAVES ->
       AT(r, x) = (HAS(going, x) -> 0 : AT(r, x));
       x++
    :: else -> break
    od;
    x = 0; going = 0
  }
}

/* What the own holder has of saves for which P holds. */
#define LIST(P)                                             \
  x = 0;                                                    \
  do                                                        \
  :: x < SAVES -> going = going | (P -> BIT(x) : 0); x++    \
  :: else -> break                                          \
  od;                                                       \
  x = 0

inline check_bound() {
  d_step {
    x = 0; n = 0;
    do
    :: x < SAVES -> n = n + ((AT(r, x) & STAYS) != 0); x++
    :: else -> break
    od;
    MUST(BOUND, n <= KEEP + 1 - SAFEST);
    x = 0; n = 0
  }
}

/* Puts the mark, and tells the others. */
inline mark_own() {
  d_step {
    AT(r, save) = AT(r, save) | MARK | STAYS;
    x = 0;
    do
    :: x < M * SAVES ->
       MUST(NO_MIX, x % SAVES == save || name[x % SAVES] != name[save] || !(has[x] & MARK));
       x++
    :: else -> break
    od;
    x = 0;
    good = good | BIT(r)
  }
}

inline lose_machine() {
  d_step {
    losses++; since++;
    lost = lost | BIT(r);
    x = 0;
    do
    :: x < SAVES -> AT(r, x) = 0; x++
    :: else -> break
    od;
    x = 0
  }
}

proctype Rank(byte r) {
  byte d, going;

gone: /* The rank has died; its machine may be lost. */
end_gone:
  atomic {
    if
    :: losses < LOSSES && !HAS(lost, r) && !HAS(alive, r) ->
       lose_machine();
       goto gone
    :: HAS(go, r) -> go = go & ~BIT(r)
    fi;
#if defined(M_NO_CLEAN_UP)
    skip;
#elif defined(M_CLEAN_MARKED) /* looks only for what has a mark */
    d_step { LIST((AT(r, x) & MARK) && !HAS(kept, x)) }
#elif defined(M_CLEAN_OLDER) /* leaves what is newer than what was taken */
    d_step { LIST((AT(r, x) & STAYS) && kept >= BIT(x) && !HAS(kept, x)) }
#else
    d_step { LIST((AT(r, x) & STAYS) && !HAS(kept, x)) }
#endif
    if
    :: going == 0 -> goto cleaned
    :: else
    fi
  }
  if
  :: free_marks()
  DIES
  fi;
  if
  :: free_files()
  DIES
  fi;
cleaned:
  atomic {
    check_bound();
    if
    :: save == NONE -> over = over | BIT(r); goto rests
    :: else
    fi
  }

begins:
  if
  :: AT(r, save) = AT(r, save) | BIT(r)
  IS_REFUSED
  DIES
  fi;
#if R > 0 && !defined(M_COMMIT_EARLY) /* the commit does not wait for replicas, and they come later than all this */
next_peer:
  if
  :: atomic {
       !HAS(lost, PEER(r, d + 1)) ->
       AT(PEER(r, d + 1), save) = AT(PEER(r, d + 1), save) | BIT(r);
       d++;
       if
       :: d < R -> goto next_peer
       :: else -> d = 0
       fi;
       IS_WRITTEN
     }
  :: atomic { HAS(lost, PEER(r, d + 1)) -> goto fails }
  IS_REFUSED
  DIES
  fi;
#else
  IS_WRITTEN;
#endif

  if
  :: atomic { r == first && written == ALL -> goto marks }
  :: atomic { r != first && HAS(good, first) && !HAS(lost, first) -> goto marks } /* takes the notes from there */
#if !defined(M_WAIT) /* nobody looks whether another one has failed */
  :: atomic { bad != 0 || SOMEBODY_DIED -> goto fails }
#endif
  DIES
  fi;

marks: /* Notes, then the mark. Nobody sees one without the other, as what has no mark goes with its rank. */
  if
#if defined(M_MARK_FIRST)
  :: mark_own()
#elif defined(M_NO_OWN_MARK) /* the notes are enough for the others */
  :: atomic { MAY_MARK(r) && r == first -> AT(r, save) = AT(r, save) | NOTES; mark_own() }
  :: atomic { MAY_MARK(r) && r != first -> AT(r, save) = AT(r, save) | NOTES; good = good | BIT(r) }
  :: atomic { !MAY_MARK(r) -> goto fails }
#else
  :: atomic { MAY_MARK(r) -> AT(r, save) = AT(r, save) | NOTES; mark_own() }
  :: atomic { !MAY_MARK(r) -> goto fails }
#endif
  IS_REFUSED
  DIES
  fi;
#if defined(M_MARK_FIRST)
  if
  :: AT(r, save) = AT(r, save) | NOTES
  DIES
  fi;
#endif
#if defined(M_FREE_EARLY) /* older states are freed before the report */
  going = BIT(save) - 1;
  free_marks();
  free_files();
#endif

  /* Hears what the others say. What one says that has died since may be heard or not. */
  if
  :: atomic { HEARS_ALL -> goto reports }
  :: atomic { bad != 0 -> goto fails }
#if defined(M_FREE_ON_LOST) /* whoever does not hear from all frees what it has put */
  :: atomic { SOMEBODY_DIED -> goto fails }
#else
  :: atomic { SOMEBODY_DIED -> goto rests } /* the others may have reported it */
#endif
  DIES
  fi;

reports:
  atomic {
    since = (reported < save -> COUNT(lost) : since);
    reported = save;
    open = open & ~BIT(r);
    d_step { LIST(x < save && AT(r, x) != 0) }
    goto frees
  }

fails: /* Nobody reports this save, now or later: this rank has not said that its mark is put, or another has failed. */
  atomic {
    bad = bad | BIT(r);
    open = open & ~BIT(r);
    d = 0;
#if !defined(M_KEEP_FAILED)
    going = (AT(r, save) & STAYS -> BIT(save) : 0)
#endif
  }

frees:
  atomic {
    if
    :: going == 0 -> goto freed
    :: else
    fi
  }
  if
  :: free_marks()
  DIES
  fi;
  if
  :: free_files()
  DIES
  fi;
freed:
  atomic {
    check_bound();
    over = (SOMEBODY_DIED -> 0 : over | BIT(r))
  }

rests:
end_rests:
  if
  :: atomic { HAS(go, r) -> go = go & ~BIT(r); goto begins }
  DIES
  fi;

dies: /* Notes without a mark go with their rank; a holder frees files one by one. */
  atomic {
    alive = alive & ~BIT(r);
    go = go & ~BIT(r);
    open = open & ~BIT(r);
    over = 0; going = 0; d = 0;
    if
    :: save != NONE && !(AT(r, save) & STAYS) -> AT(r, save) = AT(r, save) & ~NOTES
    :: else
    fi;
    goto gone
  }
}

/* --- Jobs -------------------------------------------------------------------------------------------------------- */

#if defined(M_COUNT_UNMARKED) /* what is there counts, also if no mark says that it stays */
#define COUNTS(j, s) true
#else
#define COUNTS(j, s) (AT(j, s) & MARK)
#endif

/* Which files there are of save `s`, in `n`, and how many holders have a mark of it, in `y`. */
inline look_for(s) {
  x = 0; n = 0; y = 0;
  do
  :: x < M ->
     n = n | (COUNTS(x, s) -> AT(x, s) & FILES : 0);
     y = y + ((AT(x, s) & MARK) != 0);
     MUST(NO_MIX, IS_SOUND(AT(x, s)));
     x++
  :: else -> x = 0; break
  od
}

/* What still waits to be freed of saves before is never looked at again. */
inline begin_save() {
  x = 0;
  do
  :: x < M * SAVES -> has[x] = (has[x] & STAYS -> has[x] : 0); x++
  :: else -> break
  od;
  x = 0;
  written = 0; good = 0; bad = 0; over = 0;
  go = ALL
}

proctype World() {
  byte s, best;

  do
  :: d_step {
       over == ALL && alive == ALL && save < SAVES - 1 ->
       save++;
       name[save] = name[save - 1] + 1;
       open = ALL;
       begin_save()
     }
  :: atomic {
       alive == 0 && jobs < JOBS ->
       jobs++;
looks:
       if
       :: first = 0
#if MOVES
       :: first = 1
#endif
#if MOVES && M > 2
       :: first = 2
#endif
#if MOVES && M > 3
       :: first = 3
#endif
       fi;
       skip;
       d_step {
         lost = 0;
         taken = NONE; best = NONE; most = 0;
         s = 0;
         do
         :: s < SAVES ->
            look_for(s);
            if
#if defined(M_MARK_ALONE) /* one mark is enough */
            :: y > 0 ->
#else
            :: y > 0 && n == ALL ->
#endif
               taken = s;
               best = (y >= most -> s : best);
               most = (y >= most -> y : most)
            :: else
            fi;
            s++
         :: else -> s = 0; break
         od;
#if SAFEST
         taken = best;
#endif
         MUST(NEWEST, since > R || (taken != NONE && taken >= reported));
         if
         :: taken != NONE && taken < reported -> look_for(reported); MUST(NEWEST, n != ALL)
         :: else
         fi;
         x = 0; y = 0; n = 0; most = 0
       }
     }
     if
     :: taken == NONE -> break
     :: atomic { taken != NONE && lost != 0 -> goto looks }
     :: d_step {
          taken != NONE && lost == 0 ->
          x = 0; n = 0;
          do
          :: x < M -> n = n | AT(x, taken) & FILES; x++
          :: else -> x = 0; break
          od;
          MUST(WHOLE, n == ALL);
          n = 0;
#if defined(M_KEEP_TAKEN) /* what is taken is all that is kept */
          kept = BIT(taken);
#else
          kept = BIT(taken) | BIT(best);
#endif
          if
          :: save < SAVES - 1 ->
             save++;
#if NEW_NAMES
             name[save] = save;
#else
             name[save] = name[taken] + 1;
#endif
             open = ALL
          :: else -> save = NONE; open = 0
          fi;
          best = 0; taken = 0;
          alive = ALL;
          begin_save()
        }
     fi
  :: timeout -> MUST(NO_WAIT, over == ALL || SOMEBODY_DIED); break
  od
}

init {
  atomic {
    alive = ALL;
    over = ALL;
    kept = 1;
    d_step {
      x = 0;
      do
      :: x < M -> AT(x, 0) = EXPECTED(x) | NOTES | MARK | STAYS; x++
      :: else -> break
      od;
      x = 0
    };
    save = 0;
    go = 0;
    run World();
    x = 0;
    do
    :: x < M -> run Holder(x); run Rank(x); x++
    :: else -> break
    od;
    x = 0
  }
}
